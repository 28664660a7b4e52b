// Keys, zone of times, refresh and staleness of the operations page. The page works without it.
(() => {
  "use strict";
  const POLL_MS = 2000, LOST_MS = 15000, MINUTE = 60000;
  const root = document.body.dataset.root, html = document.documentElement;
  const $ = (selector, of = document) => of.querySelector(selector);
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  let offset = Number($("#fresh").dataset.now) - Date.now(); // clock of the server, less that of this browser
  let answered = Date.now(), shown = $("#fresh").dataset.tag;

  // ---- times -----------------------------------------------------------------------------------------------
  let zone = "UTC";
  try { zone = localStorage.getItem("fleet-zone") || "UTC"; } catch { /* storage is off */ }
  const local = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
  const units = [[31536000, "y"], [86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const coarse = (ms) => {
    const seconds = Math.floor(Math.abs(ms) / 1000), unit = units.find(([size]) => seconds >= size) || [1, "s"];
    return `${Math.floor(seconds / unit[0]).toLocaleString("en")} ${unit[1]}`;
  };
  const parts = (ms, timeZone) => Object.fromEntries(new Intl.DateTimeFormat("en-GB", {
    timeZone, year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
  }).formatToParts(ms).map((part) => [part.type, part.value]));
  const clock = (ms, timeZone) => {
    const at = parts(ms, timeZone), now = parts(Date.now() + offset, timeZone), time = `${at.hour}:${at.minute}:${at.second}`;
    if (at.year !== now.year) return `${at.day} ${at.month} ${at.year} ${time}`;
    return at.day === now.day && at.month === now.month ? time : `${at.day} ${at.month} ${time}`;
  };
  const write = (at, text) => { if (at.textContent !== text) at.textContent = text; }; // a written text is laid out again
  const times = (of = document) => {
    const now = Date.now() + offset;
    for (const one of all(".ago[data-ms]", of)) {
      const ms = Number(one.dataset.ms);
      write(one, ms > now + 999 ? `in ${coarse(ms - now)}` : `${coarse(now - ms)} ago`);
    }
    if (zone === "UTC" && !of.converted) return;
    of.converted = true;
    for (const one of all("time[data-ms]", of)) write(one, clock(Number(one.dataset.ms), zone === "UTC" ? "UTC" : local));
  };
  const button = $("#zone");
  const name = () => { button.textContent = zone === "UTC" ? "UTC" : "local"; button.title = `Times in ${zone === "UTC" ? "UTC" : local}; switch with z`; };
  const switchZone = () => {
    zone = zone === "UTC" ? "local" : "UTC";
    try { localStorage.setItem("fleet-zone", zone); } catch { /* storage is off */ }
    document.converted = true;
    name(); times(); say(`Times in ${zone === "UTC" ? "UTC" : local}`);
  };
  button.hidden = false;
  button.addEventListener("click", switchZone);

  const say = (text) => { $("#said").textContent = text; };

  // ---- refresh ---------------------------------------------------------------------------------------------
  const fetched = (address) => fetch(address, { credentials: "same-origin", cache: "no-store", signal: AbortSignal.timeout(10000) });
  const parsed = (text) => new DOMParser().parseFromString(text, "text/html");
  const adopt = (fresh) => {
    const now = $("#fresh"), button_ = $("#newer");
    const wanted = button_ && !button_.hidden;
    now.replaceWith(fresh);
    if (wanted) offer();
    html.dataset.state = fresh.dataset.state;
    offset = Number(fresh.dataset.now) - Date.now();
    times(fresh);
  };
  const offer = () => {
    const offered = $("#newer");
    offered.hidden = false;
    offered.onclick = () => { shown = $("#fresh").dataset.tag; reload(); };
  };
  const reload = async () => {
    const answer = await fetched(location.href);
    if (!answer.ok) return;
    const page = parsed(await answer.text());
    for (const live of all("[data-live]")) {
      const newer = page.getElementById(live.id);
      if (!newer || newer.innerHTML === live.innerHTML) continue;
      const focus = live.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      const open = all("details[open]", live).map((one) => one.id);
      live.replaceChildren(...newer.childNodes);
      for (const id of open) { const one = id && document.getElementById(id); if (one) one.open = true; }
      if (focus) all("a[href]", live).find((one) => one.getAttribute("href") === focus)?.focus({ preventScroll: true });
      times(live);
    }
    const fresh = page.getElementById("fresh");
    if (fresh) { shown = fresh.dataset.tag; $("#newer").hidden = true; adopt(fresh); }
  };
  const lost = (is) => { html.classList.toggle("lost", is); $("#lost").hidden = !is; };
  const poll = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetched(`${root}/fragments/freshness`);
        if (answer.status === 401) { location.reload(); return; }
        const fresh = answer.ok && parsed(await answer.text()).getElementById("fresh");
        if (fresh) {
          answered = Date.now();
          const { tag } = fresh.dataset, how = document.body.dataset.refresh;
          adopt(fresh);
          if (tag !== shown && how === "auto") { await reload(); shown = tag; }
          if (tag !== shown && how === "ask") offer();
        }
      } catch { /* tried again; shown as lost below */ }
      lost(Date.now() - answered > LOST_MS);
      times();
    }
    setTimeout(poll, POLL_MS);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) answered = Math.max(answered, Date.now() - LOST_MS + POLL_MS * 2); });
  setTimeout(poll, POLL_MS);

  document.addEventListener("input", (event) => { // the slider of the past: its value is epoch milliseconds
    if (event.target.id !== "slide") return;
    const ms = Number(event.target.value), at = $("#slid time"), text = clock(ms, zone === "UTC" ? "UTC" : local);
    at.dataset.ms = ms;
    at.dateTime = at.title = new Date(ms).toISOString();
    write(at, text);
    event.target.setAttribute("aria-valuetext", text);
  });

  // ---- links, rows and keys --------------------------------------------------------------------------------
  const copy = async () => {
    const link = $("[data-copy]")?.dataset.copy, address = link ? new URL(link, location.href).href : location.href;
    try { await navigator.clipboard.writeText(address); say("Link copied"); flash("Copied"); } catch { say(address); }
  };
  const flash = (text) => {
    const at = $("[data-copy]");
    if (!at) return;
    const before = at.textContent;
    at.textContent = text;
    setTimeout(() => { at.textContent = before; }, 1500);
  };
  for (const one of all("[data-copy]")) { one.hidden = false; }
  document.addEventListener("click", (event) => { if (event.target.closest?.("[data-copy]")) copy(); });
  const step = (by) => {
    const rows = all("tr[data-row]"), at = rows.findIndex((row) => row.classList.contains("chosen"));
    const next = rows[Math.min(rows.length - 1, Math.max(0, at + by))];
    if (!next) return;
    rows[at]?.classList.remove("chosen");
    next.classList.add("chosen");
    $("a[href]", next)?.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  };
  const go = { f: "/", d: "/devices", c: "/changes" };
  let pressed = "";
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea, [contenteditable]");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing) { if (event.key === "Escape") event.target.blur(); return; }
    const before = pressed;
    pressed = event.key;
    if (before === "g" && go[event.key]) { location.href = root + go[event.key]; return; }
    const act = {
      "/": () => $('[data-key="/"]')?.focus(), j: () => step(1), k: () => step(-1), z: switchZone, y: copy,
      "?": () => { location.href = `${root}/help`; },
      Enter: () => { if (event.target === document.body) $("tr.chosen a[href]")?.click(); else return false; },
    }[event.key];
    if (act && act() !== false) event.preventDefault();
  });
  document.addEventListener("htmx:after:swap", () => { times(); fold(); });

  const fold = () => { if (matchMedia("(max-width: 640px)").matches) for (const one of all(".facets")) one.open = false; };

  fold();
  name();
  if (zone !== "UTC") document.converted = true;
  times();
})();
