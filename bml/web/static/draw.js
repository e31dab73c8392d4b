"use strict";
/* Draws a fabric: once, from its layout; later pages only change classes, texts and widths. */
const Draw = (() => {
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const HURT = ["dead", "slow", "suspected"];

  function make(parent, tag, attributes = {}, text = null) {
    const made = document.createElementNS(NAMESPACE, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== null) made.textContent = text;
    parent.append(made);
    return made;
  }

  function put(element, name, value) {
    if (value === null) {
      if (element.hasAttribute(name)) element.removeAttribute(name);
    } else if (element.getAttribute(name) !== String(value)) {
      element.setAttribute(name, value);
    }
  }

  function write(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  function path(line) {
    return line.map(([x, y], at) => `${at ? "L" : "M"}${x} ${y}`).join("");
  }

  function middle(line) {
    const [x0, y0] = line[0], [x1, y1] = line[1];
    return [(x0 + x1) / 2, (y0 + y1) / 2];
  }

  function sign(parent, x, y, size) {
    return make(parent, "use", { class: "sign", href: "#sign-working", x: x - size / 2, y: y - size / 2, width: size, height: size });
  }

  function rate(bytes) {
    if (bytes === null || bytes === undefined) return "";
    for (const [unit, size] of [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]]) {
      if (bytes >= size) return `${(bytes / size).toFixed(bytes < 9.95 * size ? 1 : 0)} ${unit}`;
    }
    return bytes > 0 ? `${Math.round(bytes)} B/s` : "0";
  }

  class Fabric {
    /** `chosen(key)` hears of the part that is selected: "server:4", "switch:0/2", or null. */
    constructor(svg, layout, chosen) {
      this.svg = svg;
      this.layout = layout;
      this.chosen = chosen;
      this.parts = new Map();
      this.nics = new Map();
      this.selected = null;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${layout.width} ${layout.height}`);
      svg.setAttribute("class", layout.sizes.full ? "full" : "compact");
      this.arrow();
      this.lines = make(svg, "g");
      this.overlay = make(svg, "g");
      this.boxes = make(svg, "g");
      this.top = make(svg, "g");
      this.drawLines();
      for (const place of layout.switches) this.addSwitch(place);
      for (const place of layout.nics) this.addNic(place);
      for (const place of layout.servers) this.addServer(place);
      const first = this.parts.get("server:0");
      if (first) first.group.setAttribute("tabindex", "0");
      svg.onkeydown = event => this.key(event);
      svg.onclick = event => this.clicked(event);
      this.fit();
    }

    /** Draw at natural size, or as wide as there is room; small drawings may grow a little. */
    fit() {
      const room = this.svg.parentElement.clientWidth;
      const scale = Math.min(this.layout.sizes.full ? 1.3 : 1.6, Math.max(0.8, room / this.layout.width));
      put(this.svg, "width", Math.floor(this.layout.width * scale));
      put(this.svg, "height", Math.floor(this.layout.height * scale));
    }

    arrow() {
      const marker = make(make(this.svg, "defs"), "marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto" });
      make(marker, "path", { d: "M0 0 8 4 0 8Z" });
    }

    drawLines() {
      const { layout, lines } = this;
      for (const line of layout.inner_lines) make(lines, "path", { class: "inner-line", d: path(line) });
      for (const place of layout.switches) {
        for (const line of place.bus) make(lines, "path", { class: `bus level-${place.level % 4}`, d: path(line) });
      }
      const [w, h] = layout.sizes.full ? [36, 18] : [26, 13];
      for (const box of layout.inner) {
        make(lines, "rect", { class: "inner", x: box.x - w / 2, y: box.y - h / 2, width: w, height: h, rx: 3 });
        make(lines, "text", { class: "faint", x: box.x, y: box.y + 3.5 }, box.text);
      }
      for (const label of layout.labels) make(lines, "text", { class: "faint", x: label.x, y: label.y + 4 }, label.text);
    }

    addNic(place) {
      const full = this.layout.sizes.full;
      const group = make(this.lines, "g", {});
      make(group, "path", { d: path(place.line) });
      const [endX, endY] = place.line[place.line.length - 1];
      if (!this.layout.is_cable) make(group, "circle", { class: "dot", cx: endX, cy: endY, r: full ? 3 : 2 });
      const [x, y] = middle(place.line);
      let text = null;
      if (full && place.side) {
        const offsets = { top: [8, 4], right: [19, 4], left: [-4, -8], along: [0, -6], beside: [7, 4] };
        const [dx, dy] = offsets[place.side];
        text = make(group, "text", { x: x + dx, y: y + dy }, "");
      }
      const radius = full ? 7.5 : 4.5;
      make(group, "circle", { class: "disc", cx: x, cy: y, r: radius });
      const mark = sign(group, x, y, radius * 1.5);
      const centred = place.side === "along" ? " centred" : "";
      this.nics.set(`${place.server}/${place.level}`, { group, text, mark, place, base: `nic level-${place.level % 4}${centred}` });
    }

    addSwitch(place) {
      const { sizes, is_cable: isCable } = this.layout;
      const key = `switch:${place.level}/${place.group}`;
      const group = this.addPart(key, place.x, place.y, `part switch level-${place.level % 4}`);
      const [w, h] = isCable ? (sizes.full ? [18, 18] : [10, 10]) : sizes.switch;
      const corners = `${place.x},${place.y - h / 2} ${place.x + w / 2},${place.y} ${place.x},${place.y + h / 2} ${place.x - w / 2},${place.y}`;
      const frame = { x: place.x - w / 2, y: place.y - h / 2, width: w, height: h, rx: 5 };
      if (isCable) make(group, "polygon", { class: "box", points: corners });
      else make(group, "rect", { class: "box", ...frame });
      make(group, "path", { class: "cross", d: `M${frame.x} ${frame.y}l${w} ${h}m0 ${-h}l${-w} ${h}` });
      if (!isCable) make(group, "text", { x: place.x, y: place.y + (sizes.full ? 4 : 3) }, sizes.full ? `sw ${place.level}/${place.group}` : `${place.level}/${place.group}`);
      make(group, "rect", { class: "ring", x: frame.x - 4, y: frame.y - 4, width: w + 8, height: h + 8, rx: 8 });
      const part = this.parts.get(key);
      part.base = `part switch level-${place.level % 4}${place.quiet ? " quiet cable" : ""}`;
      part.place = place;
    }

    addServer(place) {
      const { full, tile: [w, h] } = this.layout.sizes;
      const key = `server:${place.server}`;
      const group = this.addPart(key, place.x, place.y, "part server");
      const [x, y] = [place.x - w / 2, place.y - h / 2];
      make(group, "rect", { class: "box", x, y, width: w, height: h, rx: full ? 9 : 5 });
      const done = make(group, "rect", { class: "done", x: x + 8, y: y + h - 9, width: 0, height: 3.5, rx: 1.7 });
      if (!full) done.remove();
      make(group, "path", { class: "cross", d: full ? "" : `M${x + 3} ${y + 3}l${w - 6} ${h - 6}m0 ${6 - h}l${6 - w} ${h - 6}` });
      if (full) make(group, "text", { class: "id", x: x + 9, y: y + 22 }, String(place.server));
      else make(group, "text", { class: "id", x: place.x, y: place.y + 4 }, String(place.server));
      const does = full ? make(group, "text", { class: "does", x: x + 9, y: y + 39 }, "") : null;
      const [sx, sy, size] = full ? [x + w - 15, y + 16, 17] : [x + w - 1, y + 1, 10];
      if (!full) make(group, "circle", { class: "corner", cx: sx, cy: sy, r: 7 });
      const mark = sign(group, sx, sy, size);
      make(group, "rect", { class: "ring", x: x - 4, y: y - 4, width: w + 8, height: h + 8, rx: full ? 12 : 8 });
      Object.assign(this.parts.get(key), { base: "part server", place, does, done, mark });
    }

    addPart(key, x, y, name) {
      const group = make(this.boxes, "g", { class: name, role: "button", tabindex: "-1", "aria-pressed": "false", "data-part": key });
      this.parts.set(key, { group, x, y });
      return group;
    }

    /** Show the states of a page. */
    update(page) {
      const { tile: [w] } = this.layout.sizes;
      const most = Math.max(1, ...page.servers.flatMap(each => each.nics.map(nic => nic.sent_per_s || 0)));
      for (const server of page.servers) {
        const part = this.parts.get(`server:${server.server}`);
        put(part.group, "class", `${part.base} ${server.state}`);
        put(part.group, "aria-label", `Server ${server.server}, ${server.state}${server.phase ? `, ${server.phase}` : ""}`);
        put(part.mark, "href", `#sign-${server.state}`);
        if (part.does) {
          write(part.does, server.state === "working" ? server.phase || "idle" : server.state);
          put(part.done, "width", Math.round((w - 16) * (server.state === "dead" ? 0 : server.progress || 0)));
        }
        for (const nic of server.nics) this.updateNic(server, nic, most);
      }
      for (const [key, part] of this.parts) {
        if (!key.startsWith("switch:")) continue;
        const name = key.slice(7);
        const dead = page.dead_switches.includes(name);
        const seen = dead || this.selected === key;
        put(part.group, "class", `${part.base}${dead ? " dead" : ""}${seen ? " seen" : ""}`);
        put(part.group, "aria-label", `${this.layout.is_cable ? "Cable" : "Switch"} ${name}${dead ? ", dead" : ""}`);
      }
    }

    updateNic(server, nic, most) {
      const drawn = this.nics.get(`${server.server}/${nic.level}`);
      if (!drawn) return;
      const ofDead = ["dead", "absent", "ended"].includes(nic.state) && nic.state === server.state;
      const hurt = HURT.includes(nic.state) && !ofDead;
      const selected = this.selected === `server:${server.server}` || this.selected === `switch:${nic.level}/${drawn.place.group}`;
      const quiet = drawn.place.quiet ? ` quiet${hurt || selected ? " seen" : ""}` : "";
      put(drawn.group, "class", `${drawn.base} ${nic.state}${ofDead ? " of-dead" : ""}${quiet}`);
      put(drawn.mark, "href", `#sign-${nic.state}`);
      const widest = this.layout.sizes.full ? 5 : 3;
      drawn.group.style.setProperty("--width", String(1.5 + widest * (nic.sent_per_s || 0) / most));
      if (drawn.text) write(drawn.text, hurt ? nic.state : nic.sent_per_s ? rate(Math.max(nic.sent_per_s, nic.received_per_s)) : "");
      if (drawn.text) drawn.text.setAttribute("dx", hurt && drawn.place.side === "top" ? 4 : 0);
    }

    /** Draw ways of (from, level, to). */
    drawWays(ways) {
      const key = JSON.stringify(ways);
      if (key === this.drawn) return;
      this.drawn = key;
      this.overlay.replaceChildren();
      this.top.replaceChildren();
      for (const hops of ways) {
        for (const [from, , to] of hops) this.drawHop(from, to);
      }
    }

    drawHop(from, to) {
      const a = this.parts.get(`server:${from}`), b = this.parts.get(`server:${to}`);
      const { tile: [w, h] } = this.layout.sizes;
      const length = Math.hypot(b.x - a.x, b.y - a.y) || 1;
      const [ux, uy] = [(b.x - a.x) / length, (b.y - a.y) / length];
      const reach = Math.min(w / 2 / (Math.abs(ux) || 1e-9), h / 2 / (Math.abs(uy) || 1e-9)) + 3;
      const bend = (this.layout.sizes.full ? 14 : 6) + length * 0.1;
      const [x0, y0, x1, y1] = [a.x + ux * reach, a.y + uy * reach, b.x - ux * reach, b.y - uy * reach];
      const [cx, cy] = [(x0 + x1) / 2 - uy * bend, (y0 + y1) / 2 + ux * bend];
      make(this.top, "path", { class: "way", "marker-end": "url(#arrow)", d: `M${x0} ${y0}Q${cx} ${cy} ${x1} ${y1}` });
    }

    select(key, focus = false) {
      if (this.selected && this.parts.has(this.selected)) this.parts.get(this.selected).group.setAttribute("aria-pressed", "false");
      this.selected = key && this.parts.has(key) ? key : null;
      if (this.selected) {
        const { group } = this.parts.get(key);
        group.setAttribute("aria-pressed", "true");
        this.rove(group, focus);
      }
      this.chosen(this.selected);
    }

    rove(group, focus) {
      for (const each of this.svg.querySelectorAll('.part[tabindex="0"]')) each.setAttribute("tabindex", "-1");
      group.setAttribute("tabindex", "0");
      if (focus) {
        group.focus({ preventScroll: true });
        group.scrollIntoView({ block: "nearest", inline: "nearest" });
      }
    }

    clicked(event) {
      const group = event.target.closest(".part");
      if (group) this.select(group.dataset.part, true);
    }

    key(event) {
      const group = event.target.closest(".part");
      if (!group) return;
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        this.select(group.dataset.part, true);
        return;
      }
      const ways = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
      const ends = { Home: 0, End: this.layout.servers.length - 1 };
      let next = null;
      if (event.key in ways) next = this.nearest(group.dataset.part, ...ways[event.key]);
      else if (event.key in ends) next = `server:${ends[event.key]}`;
      if (!next) return;
      event.preventDefault();
      this.rove(this.parts.get(next).group, true);
    }

    /** The nearest part in a direction; what is aside counts as three times as far. */
    nearest(key, dx, dy) {
      const from = this.parts.get(key);
      let best = null, least = Infinity;
      for (const [other, part] of this.parts) {
        const ahead = (part.x - from.x) * dx + (part.y - from.y) * dy;
        const aside = Math.abs((part.x - from.x) * dy) + Math.abs((part.y - from.y) * dx);
        const hidden = part.group.matches(".quiet.cable:not(.seen)");
        if (other !== key && ahead > 1 && !hidden && ahead + 3 * aside < least) [best, least] = [other, ahead + 3 * aside];
      }
      return best;
    }
  }

  /** The first layout that fits into a width of so many pixels without being too small to read, or the last. */
  function fitting(layouts, room) {
    return layouts.find(each => each.width * 0.85 <= room) || layouts[layouts.length - 1];
  }

  return { Fabric, fitting, write, put, rate };
})();
