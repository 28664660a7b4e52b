// Actions of the operations page inside Airflow: each form starts a run of its DAG by Airflow's REST, as the user of
// the page. Airflow decides whether the user may. Without this script, a link leads to the form of Airflow.
(() => {
  "use strict";
  const LIMIT_MS = 30000;
  const said = (form, text, address, label) => {
    const out = form.querySelector("output");
    out.textContent = text;
    if (address) {
      const link = document.createElement("a");
      link.href = address;
      link.textContent = label;
      out.append(" ", link);
    }
  };
  const conf = (form) => {
    const values = {};
    for (const field of form.elements) {
      if (!field.name) continue;
      const text = field.value;
      if (text === "") values[field.name] = null;
      else values[field.name] = "instant" in field.dataset ? new Date(`${text}Z`).toISOString() : text;
    }
    return values;
  };
  const why = async (answer, form) => {
    const { dag, command } = form.dataset;
    if (answer.status === 401) return "Your session of Airflow has ended: log in again, and repeat the action.";
    if (answer.status === 403) return `You may not start ${dag} in Airflow. An operator can, or types: ${command}`;
    if (answer.status === 404) return `Airflow has no DAG ${dag}: it is not read yet, or was removed. Type: ${command}`;
    let detail = "";
    try {
      const found = (await answer.json()).detail;
      detail = typeof found === "string" ? found : JSON.stringify(found) || "";
    } catch { /* not JSON: the status says enough */ }
    return `Airflow refused to start ${dag} (status ${answer.status}). ${detail.slice(0, 500)}`;
  };
  const start = async (form) => {
    const { dag, airflow } = form.dataset;
    const answer = await fetch(`${airflow}/api/v2/dags/${encodeURIComponent(dag)}/dagRuns`, {
      method: "POST",
      credentials: "same-origin",
      headers: { "Content-Type": "application/json", Accept: "application/json" },
      body: JSON.stringify({ logical_date: null, conf: conf(form) }),
      signal: AbortSignal.timeout(LIMIT_MS),
    });
    if (!answer.ok) { said(form, await why(answer, form)); return; }
    const run = (await answer.json()).dag_run_id;
    said(form, "Started:", `${airflow}/dags/${encodeURIComponent(dag)}/runs/${encodeURIComponent(run)}`, run);
  };
  const show = () => { for (const form of document.querySelectorAll("form[data-dag][hidden]")) form.hidden = false; };
  new MutationObserver(show).observe(document.body, { childList: true, subtree: true }); // a list is replaced while one types
  show();
  document.addEventListener("submit", async (event) => {
    const form = event.target.closest("form[data-dag]");
    if (!form) return;
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    said(form, "Starting …");
    try { await start(form); } catch { said(form, "Airflow does not answer. Look at its list of runs before you repeat the action."); }
    button.disabled = false;
  });
})();
