// A device of our own format, by the general MQTT client for Node: heartbeats with QoS 1 over MQTT 3.1.1, in a session that is kept.
"use strict";
const mqtt = require("mqtt");

const { SERVER, NAME, PASSWORD, COUNT } = process.env;
const client = mqtt.connect(SERVER, { username: NAME, password: PASSWORD, clientId: NAME, clean: false, protocolVersion: 4 });

client.on("error", (error) => {
  console.error(String(error));
  process.exit(1);
});
client.on("connect", async () => {
  for (let seq = 0; seq < Number(COUNT); seq += 1) {
    await client.publishAsync(`fleet/site/${NAME}/heartbeat`, JSON.stringify({ ts: Date.now(), seq }), { qos: 1 });
  }
  await client.endAsync();
  console.log("acknowledged");
});
