"use strict";
/* The page of a job. The launcher sends three events: the fabric once, its history and the page when they change. */
(() => {
  const token = new URLSearchParams(location.search).get("token") || "";
  const injects = document.documentElement.dataset.inject === "yes";
  const { write, put, rate } = Draw;
  const at = id => document.getElementById(id);
  const SIGNS = { fine: "working", well: "working", hurt: "warning", failed: "dead", ended: "ended", changing: "changing", starting: "changing" };
  const OF_EVENT = { view: "plain", suspected: "suspected", joining: "joining", coordinator: "joining", lost: "dead", left: "absent", fault: "slow", ended: "ended" };
  const SILENCE = {
    [EventSource.CONNECTING]: "Trying again …",
    [EventSource.OPEN]: "It is stopped or very busy, or a tunnel passes nothing.",
    [EventSource.CLOSED]: "Load the page again.",
  };
  const OLD_MS = 5000; // a page comes twice a second; one of a job with frozen servers takes a second or two
  const EVENT_SIGN = { view: "changing", coordinator: "changing", fault: "warning" };
  let fabric = null, layout = null, page = null, chosenWay = null, offers = {}, layouts = [], drawn = "";

  function make(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function signOf(name) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "sign");
    svg.setAttribute("aria-hidden", "true");
    const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
    use.setAttribute("href", `#sign-${name}`);
    svg.append(use);
    return svg;
  }

  /** Make the children of a list anew, but only if they are to change: focus and selections stay. */
  function list(parent, items, makeItem) {
    const key = JSON.stringify(items);
    if (parent.dataset.shown === key) return;
    const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    parent.dataset.shown = key;
    parent.replaceChildren(...items.map(makeItem));
    if (focused !== null && focused !== undefined) {
      const again = [...parent.querySelectorAll("[data-key]")].find(each => each.dataset.key === focused);
      if (again) again.focus();
    }
  }

  function time(seconds) {
    const date = new Date(seconds * 1000);
    return make("time", { datetime: date.toISOString() }, date.toTimeString().slice(0, 8));
  }

  // --- the parts of the page ---------------------------------------------------------------------

  function show(next) {
    const before = page;
    page = next;
    write(at("job"), page.job);
    write(at("about"), page.about);
    document.title = `${page.headline} – ${page.job || "bml"}`;
    put(at("banner"), "data-mood", page.mood);
    put(at("mood"), "href", `#sign-${SIGNS[page.mood]}`);
    write(at("headline"), page.headline);
    write(at("reason"), page.epoch ? `View ${page.epoch}: ${page.reason || "no reason given yet"}` : "");
    write(at("step"), page.step.toLocaleString("en"));
    write(at("pace"), page.steps_per_s === null ? "–" : page.steps_per_s.toFixed(page.steps_per_s < 10 ? 1 : 0));
    write(at("epoch"), String(page.epoch || "–"));
    write(at("phase"), page.phase || "–");
    announce(before);
    legend();
    troubles();
    forecasts();
    ways();
    servers();
    if (fabric && page.servers.length) fabric.update(page);
    part();
    if (page.ended) end();
  }

  function announce(before) {
    if (before && before.headline === page.headline && before.epoch === page.epoch) return;
    const why = page.epoch && !page.ended ? ` View ${page.epoch}: ${page.reason}` : "";
    write(at("live"), `${page.headline}.${why}`);
  }

  function legend() {
    list(at("legend"), Object.entries(page.counts), ([state, count]) =>
      make("li", { class: `chip ${state}` }, signOf(state), `${count} ${state}`));
  }

  function troubles() {
    const none = page.ended ? "Nothing was known to be broken." : "Nothing: all parts work.";
    const nothing = page.servers.length ? none : "Nothing is known yet.";
    list(at("troubles"), page.trouble.length ? page.trouble : [nothing], each => {
      if (each === nothing) return page.servers.length ? row("working", "working", nothing) : row("plain", "silent", nothing);
      const key = each.kind === "nic" ? `server:${each.part.split("/")[0]}` : `${each.kind}:${each.part}`;
      const button = make("button", { type: "button", "data-key": `${each.kind}:${each.part}` }, signOf(each.state), make("span", { class: "text" }, each.text));
      button.addEventListener("click", () => fabric && fabric.select(key));
      return make("li", { class: each.state }, button);
    });
  }

  function row(kind, sign, text) {
    return make("li", { class: kind }, make("p", {}, signOf(sign), make("span", { class: "text" }, text)));
  }

  function forecasts() {
    at("early").hidden = !page.warnings.length;
    list(at("warnings"), page.warnings, text => row("warning", "warning", text));
    at("forecast").hidden = !page.predicted.length;
    list(at("predicted"), page.predicted.flatMap(([name, value]) => [["dt", name], ["dd", value]]), ([tag, text]) => make(tag, {}, text));
  }

  function ways() {
    at("round").hidden = !page.detours.length;
    if (!page.detours.some(each => each.text === chosenWay)) chosenWay = null;
    list(at("detours"), page.detours.map(each => [each.text, each.text === chosenWay]), ([text, pressed]) => {
      const button = make("button", { type: "button", "aria-pressed": String(pressed), "data-key": text }, signOf("detour"), make("span", { class: "text" }, text));
      button.addEventListener("click", () => { chosenWay = chosenWay === text ? null : text; ways(); });
      return make("li", { class: "detour" }, button);
    });
    if (!fabric) return;
    const drawn = chosenWay ? page.detours.filter(each => each.text === chosenWay) : page.detours.length <= 2 ? page.detours : [];
    fabric.drawWays(drawn.map(each => each.hops));
  }

  function nicText(nic) {
    if (nic.state !== "working" && nic.state !== "slow") return nic.state;
    if (nic.sent_per_s === null) return "–";
    return `${rate(nic.sent_per_s)} / ${rate(nic.received_per_s)}${nic.state === "slow" ? " slow" : ""}`;
  }

  function servers() {
    const body = at("servers");
    while (body.rows.length > page.servers.length) body.deleteRow(-1);
    page.servers.forEach((each, row) => {
      let line = body.rows[row];
      if (!line) {
        line = body.insertRow();
        line.append(make("th", { scope: "row" }));
        for (const name of ["", "number", "phase", "lines", ""]) line.append(make("td", name ? { class: name } : {}));
      }
      const [number, state, step, phase, nics, waits] = line.children;
      write(number, String(each.server));
      if (state.dataset.state !== each.state) {
        state.dataset.state = each.state;
        state.replaceChildren(make("span", { class: `state ${each.state}` }, signOf(each.state), each.state));
      }
      write(step, each.step === null ? "" : String(each.step));
      write(phase, each.phase ? each.phase + (each.progress === null ? "" : ` ${Math.round(each.progress * 100)} %`) : "");
      write(nics, each.nics.map(nic => `${nic.level}: ${nicText(nic)}`).join("\n"));
      write(waits, each.waits_for || each.why);
    });
  }

  function history({ views, events }) {
    list(at("views"), [...views].reverse(), each => make("li", {}, time(each.at_s), signOf("changing"), make("span", {},
      `View ${each.epoch}: ${each.members} servers, ${each.reason || "no reason given"}`,
      each.noticed_s > 0 ? make("small", {}, `noticed within ${Math.max(1, Math.round(each.noticed_s * 1000))} ms`) : "")));
    list(at("events"), [...events].reverse(), each => {
      const kind = OF_EVENT[each.kind] || "plain";
      return make("li", { class: kind }, time(each.at_s), signOf(EVENT_SIGN[each.kind] || kind), make("span", {}, each.text));
    });
  }

  // --- the selected part -------------------------------------------------------------------------

  function part() {
    const key = fabric && fabric.selected;
    at("part").hidden = !key;
    if (!key) return;
    const [kind, name] = key.split(":");
    if (kind === "server") serverPart(page.servers[Number(name)]);
    else switchPart(name);
  }

  function serverPart(server) {
    if (!server) return;
    const place = layout.servers[server.server];
    write(at("part-title"), `Server ${server.server}, address ${place.address}`);
    const does = server.step === null ? "" : ` Step ${server.step}${server.phase ? `, ${server.phase}` : ""}.${server.waits_for ? ` Waits for: ${server.waits_for}` : ""}`;
    write(at("part-text"), `${server.state === "working" ? "It works." : `${server.state}: ${server.why}.`}${does}`);
    list(at("part-rows"), [server.nics.map(nic => [`${server.server}/${nic.level}`, nic.state, nic.why, rate(nic.sent_per_s), rate(nic.received_per_s)])], rows => {
      const head = make("tr", {}, ...["NIC", "State", "Out", "In"].map((text, i) => make("th", { scope: "col", class: i > 1 ? "number" : "" }, text)));
      const lines = rows.map(([name, state, why, sent, received]) => make("tr", {},
        make("th", { scope: "row" }, name),
        make("td", {}, make("span", { class: `state ${state}` }, signOf(state), state), why ? make("div", { class: "hint" }, why) : ""),
        make("td", { class: "number rate" }, sent), make("td", { class: "number rate" }, received)));
      return make("table", { "aria-labelledby": "part-title" }, make("thead", {}, head), make("tbody", {}, ...lines));
    });
    faults([["server", String(server.server), "Server"], ...server.nics.map(nic => ["nic", `${server.server}/${nic.level}`, `NIC ${server.server}/${nic.level}`])]);
  }

  function switchPart(name) {
    const [level, group] = name.split("/").map(Number);
    const place = layout.switches.find(each => each.level === level && each.group === group);
    const what = layout.is_cable ? "Cable" : "Switch";
    write(at("part-title"), `${what} ${name}`);
    const members = place.members.length > 24 ? `${place.members.length} servers` : `servers ${place.members.join(", ")}`;
    write(at("part-text"), `${page.dead_switches.includes(name) ? "It is dead." : "Nothing is known to be wrong with it."} It joins ${members}.`);
    list(at("part-rows"), [], () => "");
    faults([["switch", name, what]]);
  }

  function faults(groups) {
    if (!injects || page.ended) return list(at("part-faults"), [], () => "");
    list(at("part-faults"), groups, ([kind, name, title]) => faultButtons(kind, name, title));
  }

  function faultButtons(kind, name, title) {
    const buttons = offers[kind].map(offer => {
      const fault = offer.text.replace("{}", name);
      const button = make("button", { type: "button", "data-key": fault, "data-fault": fault }, offer.label);
      button.addEventListener("click", () => ask(fault, `${title}: ${offer.means}`));
      return button;
    });
    return make("div", { class: "faults" }, make("h3", {}, title), make("div", { class: "buttons" }, ...buttons));
  }

  // --- faults ------------------------------------------------------------------------------------

  function ask(fault, means) {
    const dialog = at("confirm");
    const focused = document.activeElement;
    write(at("confirm-fault"), fault);
    write(at("confirm-means"), means);
    dialog.returnValue = "no";
    dialog.onclose = () => {
      if (focused && focused.isConnected) focused.focus();
      if (dialog.returnValue === "yes") inject(fault);
    };
    dialog.showModal();
  }

  async function inject(fault) {
    write(at("injected"), `${fault} is being injected …`);
    let said;
    try {
      const answer = await fetch("/api/inject", {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-BML-Token": token },
        body: JSON.stringify({ fault }),
      });
      const told = await answer.text();
      const body = told.startsWith("{") ? JSON.parse(told) : { error: told.trim() };
      said = body.error ? `${fault} was not injected: ${body.error}` : `${body.fault}: ${body.done.join("; ")}`;
    } catch (error) {
      said = `${fault}: the launcher does not answer (${error.message})`;
    }
    write(at("injected"), said);
  }

  // --- the stream --------------------------------------------------------------------------------

  function end() {
    stream.close();
    at("connection").hidden = true;
    document.body.classList.remove("stale");
    at("inject").hidden = true;
    part();
  }

  let heard = Date.now();

  /** Say that what is shown is old, and since when. */
  function old() {
    if (page && page.ended) return;
    const since = new Date(page ? page.now_s * 1000 : heard).toTimeString().slice(0, 8);
    document.body.classList.add("stale");
    at("connection").hidden = false;
    write(at("connection"), `No word from the launcher since ${since}: what is shown is old. ${SILENCE[stream.readyState]}`);
  }

  function hear() {
    heard = Date.now();
    at("connection").hidden = true;
    document.body.classList.remove("stale");
  }

  const stream = new EventSource(`/api/events?token=${encodeURIComponent(token)}`);
  stream.addEventListener("fabric", event => {
    if (layout && event.data === drawn) return; // the stream has been opened again
    drawn = event.data;
    ({ layouts, offers } = JSON.parse(event.data));
    layout = null;
    fit();
    if (injects) {
      at("inject").hidden = false;
      at("job-faults").replaceChildren(faultButtons("job", "", "Coordinator"));
    }
  });
  stream.addEventListener("history", event => history(JSON.parse(event.data)));
  stream.addEventListener("page", event => {
    const next = JSON.parse(event.data);
    if (!page || next.now_s !== page.now_s) hear(); // a stream that is opened again begins with what it had
    show(next);
  });
  stream.addEventListener("error", old);
  setInterval(() => Date.now() - heard >= OLD_MS && old(), 1000); // a stopped launcher, or tunnel, gives no error

  /** Draw the layout that fits, anew if it is another one than before. */
  function fit() {
    const best = Draw.fitting(layouts, at("stage").clientWidth);
    if (best === layout) return fabric && fabric.fit();
    layout = best;
    const selected = fabric && fabric.selected;
    fabric = new Draw.Fabric(at("drawing"), layout, () => page && page.servers.length && (fabric.update(page), part()));
    if (page && page.servers.length) fabric.update(page);
    if (selected) fabric.select(selected);
    if (page) ways();
  }

  new ResizeObserver(() => layouts.length && fit()).observe(at("stage"));
  at("unselect").addEventListener("click", () => {
    const key = fabric.selected;
    fabric.select(null);
    fabric.parts.get(key).group.focus();
  });
  at("any-fault").addEventListener("submit", event => {
    event.preventDefault();
    const fault = at("fault").value.trim();
    if (fault) ask(fault, "As bml inject does.");
  });
})();
