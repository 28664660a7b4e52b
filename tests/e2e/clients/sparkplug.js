// An edge node with one device, by Eclipse Tahu's JavaScript client: births, then data until it is killed.
"use strict";
const { newClient } = require("sparkplug-client");

const { SERVER, NAME, PASSWORD, GROUP, NODE, DEVICE } = process.env;
const client = newClient({
  serverUrl: SERVER,
  username: NAME,
  password: PASSWORD,
  groupId: GROUP,
  edgeNode: NODE,
  clientId: NAME,
});
const metrics = () => [
  { name: "temperature", type: "Float", value: 21.5 },
  { name: "steps", type: "Int32", value: -7 },
];

client.on("error", (error) => {
  console.error(String(error));
  process.exit(1);
});
client.on("birth", () => {
  client.publishNodeBirth({ timestamp: Date.now(), metrics: [{ name: "Node Control/Rebirth", type: "Boolean", value: false }] });
  client.publishDeviceBirth(DEVICE, { timestamp: Date.now(), metrics: metrics() });
  console.log("born");
});
setInterval(() => client.publishDeviceData(DEVICE, { timestamp: Date.now(), metrics: metrics() }), 300);
