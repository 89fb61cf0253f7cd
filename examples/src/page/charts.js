"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const finite = x => typeof x === "number" && Number.isFinite(x);
const fixed = (x, digits) => finite(x) ? x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "–";
const compact = x => x.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
const number = x => fixed(x, 0);
const width = id => Math.max(260, byId(id).clientWidth);
const largest = list => list.reduce((a, b) => finite(b) && b > a ? b : a, -Infinity);
const smallest = list => list.reduce((a, b) => finite(b) && b < a ? b : a, Infinity);
const average = list => sum(list) / list.length;
const sum = list => list.reduce((a, b) => a + b, 0);

function svg(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const text = (x, y, content, anchor = "middle", kind = "") =>
  svg("text", { x, y, "text-anchor": anchor, class: kind }, content);
// A chart says in words what it shows; single values are in tooltips and tables.
const chart = (w, h, label) => svg("svg", { width: w, height: h, role: "img", "aria-label": label });
function element(name, content, kind) {
  const node = document.createElement(name);
  if (kind) node.className = kind;
  node.append(...[content].flat());
  return node;
}

// How each balancer's line looks. `none` is wide, to be seen under a line that runs over it.
const LOOK = {
  none: { stroke: "var(--none)", "stroke-width": 5, "stroke-opacity": 0.6 },
  exact: { stroke: "var(--exact)", "stroke-width": 2 },
  ideal: { stroke: "var(--ideal)", "stroke-width": 2, "stroke-dasharray": "6 4" },
  before: { stroke: "var(--mean)", "stroke-width": 2, "stroke-dasharray": "2 3" },
};
const look = name => typeof name === "object" ? name : LOOK[name] || LOOK.exact;

function lineKey(id, series) {
  byId(id).replaceChildren(...series.map(s => {
    const mark = svg("svg", { width: 28, height: 10, "aria-hidden": "true" },
      svg("line", { x1: 0, x2: 28, y1: 5, y2: 5, ...look(s.look) }));
    return element("span", [mark, s.name]);
  }));
}

// Tooltips of everything with data-tip, for pointer and touch.
function showTip(content, x, y) {
  const tip = byId("tip");
  tip.hidden = !content;
  if (!content) return;
  if (tip.textContent !== content) tip.textContent = content;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`;
}
for (const kind of ["pointermove", "pointerdown"]) addEventListener(kind, event => {
  if (event.target.closest?.(".guide")) return;
  showTip(event.target.closest?.("[data-tip]")?.dataset.tip, event.clientX, event.clientY);
});
addEventListener("scroll", () => showTip(), { passive: true });

// Imbalance to 0..1, by the logarithm of what is above 1, since 1.01 and 1.001 differ as much as 1.1 and 1.01.
const LOW = 0.001;
const level = (x, most) => {
  const top = Math.max(most - 1, 10 * LOW);
  return Math.min(1, Math.max(0, Math.log(Math.max(x - 1, LOW) / LOW) / Math.log(top / LOW)));
};
const levelTicks = most => [1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2, 4, 8, 16, 32].filter(t => t <= Math.max(most, 1.01));
const STOPS = {
  light: [[247, 250, 252], [253, 219, 155], [240, 130, 60], [165, 25, 40], [70, 5, 35]],
  dark: [[30, 40, 50], [78, 52, 82], [165, 62, 84], [236, 134, 66], [255, 236, 170]],
};
function shade(t) {
  const stops = dark.matches ? STOPS.dark : STOPS.light;
  const at = t * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at)), f = at - i;
  return stops[i].map((a, c) => Math.round(a + (stops[i + 1][c] - a) * f));
}
const colour = t => `rgb(${shade(t).join(",")})`;
const inkOn = t => { const [r, g, b] = shade(t); return r * 0.3 + g * 0.59 + b * 0.11 > 130 ? "#10181f" : "#fff"; };

function scale(id, most) {
  const w = Math.min(width(id), 460), bar = w - 60;
  const root = chart(w, 34, `Colour scale of imbalance, from 1.001 to ${fixed(most, 3)}, logarithmic`);
  for (let i = 0; i < 100; i++)
    root.append(svg("rect", { x: 20 + bar * i / 100, y: 2, width: bar / 100 + 0.5, height: 12, fill: colour(i / 99) }));
  let last = -1e9;
  for (const t of levelTicks(most)) {
    const x = 20 + bar * level(t, most);
    if (x - last < 42) continue;
    last = x;
    root.append(svg("line", { x1: x, x2: x, y1: 14, y2: 18, stroke: "var(--soft)" }), text(x, 30, t));
  }
  byId(id).replaceChildren(root);
}

// Heat map. `rows` are names of rows; `columns` are { name, tip }; `cell(row, column)` is a value; `choose(row, column)` is
// called for a click; `chosen` is [row, column]; columns are at least `least` wide.
function heat(id, { rows, columns, cell, choose, chosen, most, rowName, columnName, label, least = 7, digits = 3 }) {
  const left = 42, top = 6, ch = rows.length > 40 ? 10 : rows.length > 10 ? 15 : 26;
  const cw = Math.max(least, Math.min(60, (width(id) - left - 8) / columns.length));
  const bottom = top + ch * rows.length, root = chart(left + cw * columns.length + 8, bottom + 38, label);
  const everyRow = Math.ceil(14 / ch), every = Math.ceil(28 / cw);
  rows.forEach((name, r) => { if (r % everyRow === 0) root.append(text(left - 6, top + ch * (r + 0.5) + 4, name, "end")); });
  columns.forEach((c, i) => { if (i % every === 0) root.append(text(left + cw * (i + 0.5), bottom + 15, c.name)); });
  root.append(text(left + cw * columns.length / 2, bottom + 32, columnName));
  root.append(svg("text", { "text-anchor": "middle", transform: `translate(11 ${top + Math.max(ch * rows.length / 2, 18)}) rotate(-90)` }, rowName));
  rows.forEach((name, r) => columns.forEach((c, i) => {
    const value = cell(r, i), t = level(value, most);
    const node = svg("rect", { x: left + cw * i, y: top + ch * r, width: cw - 1, height: ch - 1, class: "cell", fill: colour(t),
      stroke: "var(--line)", "stroke-width": 0.5, "data-tip": `${rowName} ${name}, ${c.tip}: ${fixed(value, digits)}` });
    node.addEventListener("click", () => choose(r, i));
    root.append(node);
    if (cw >= 36 && ch >= 15)
      root.append(svg("text", { x: left + cw * (i + 0.5), y: top + ch * (r + 0.5) + 4, "text-anchor": "middle",
        style: `fill:${inkOn(t)};font-size:11px`, "pointer-events": "none" }, fixed(value, cw >= 42 ? 3 : 2)));
  }));
  // Dark inside light, to be seen on any colour.
  if (chosen) for (const [stroke, size] of [["var(--page)", 5], ["var(--ink)", 2]])
    root.append(svg("rect", { x: left + cw * chosen[1], y: top + ch * chosen[0], width: cw - 1, height: ch - 1, fill: "none", stroke,
      "stroke-width": size, "pointer-events": "none" }));
  byId(id).replaceChildren(root);
}

// The next of 1, 2, 2.5, 5, 10, 20 ... and the same with any power of ten.
function nice(x) {
  const power = 10 ** Math.floor(Math.log10(x > 0 ? x : 1));
  return [1, 2, 2.5, 5, 10].map(f => f * power).find(step => step >= x * 0.999) || 10 * power;
}
function ticks(low, high, count) {
  const step = nice(Math.max(high - low, 1e-9) / count), out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && out.length < 50; i++) out.push(i * step + 0);
  return { out, digits: (String(+step.toPrecision(3)).split(".")[1] || "").length };
}
function yAxis(root, { left, right, top, height, low, high, count }) {
  const { out, digits } = ticks(low, high, count), y = v => top + height * (1 - (v - low) / (high - low));
  for (const v of out) root.append(svg("line", { x1: left, x2: right, y1: y(v), y2: y(v), stroke: "var(--line)" }),
    text(left - 6, y(v) + 4, high >= 1e5 ? compact(v) : fixed(v, digits), "end"));
  return y;
}

// Lines over steps. A series is { name, look, values, band: [low, high] }; the band is drawn pale behind the line.
function lines(id, { series, from, digits, label, unit }) {
  const w = width(id), left = 56, right = w - 12, top = 10, height = 200;
  const n = Math.max(1, ...series.map(s => s.values.length)), all = series.flatMap(s => [s.values, ...(s.band || [])].flat()).filter(finite);
  let low = from ?? (all.length ? smallest(all) : 0), high = Math.max(largest(all), low);
  if (!finite(high) || high - low < 1e-9) high = low + 1;
  const pad = (high - low) * 0.04, root = chart(w, top + height + 40, label);
  const y = yAxis(root, { left, right, top, height, low: from === undefined ? low - pad : low, high: high + pad, count: 5 });
  const x = i => n > 1 ? left + (right - left) * i / (n - 1) : (left + right) / 2;
  const every = Math.max(1, nice(n / ((right - left) / 48)));
  for (let step = Math.ceil(every); step <= n; step += Math.ceil(every)) root.append(text(x(step - 1), top + height + 16, step));
  if (every > 1 && x(Math.ceil(every) - 1) - x(0) > 26) root.append(text(x(0), top + height + 16, 1));
  root.append(text((left + right) / 2, top + height + 34, `step (height: ${unit})`));
  for (const s of series) if (s.band?.flat().every(finite)) {
    const [lower, upper] = s.band.map(b => b.map((v, i) => [x(i), y(v)].map(z => z.toFixed(1))));
    root.append(svg("path", { d: `M${upper.join("L")}L${lower.reverse().join("L")}Z`, fill: look(s.look).stroke, opacity: 0.15 }));
  }
  for (const s of series) {
    let path = "", down = false;
    s.values.forEach((v, i) => {
      if (finite(v)) path += `${down ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`;
      down = finite(v);
      if (finite(v) && n === 1) root.append(svg("circle", { cx: x(i), cy: y(v), r: 4, fill: look(s.look).stroke }));
    });
    root.append(svg("path", { d: path, fill: "none", "stroke-linejoin": "round", ...look(s.look) }));
  }
  guide(id, root, { left, right, top, height, n, x, tip: i => `step ${i + 1}\n` + series.map(s => `${s.name}: ${fixed(s.values[i], digits)}`).join("\n") });
}

// A line that follows the pointer or the arrow keys and shows the values there.
function guide(id, root, { left, right, top, height, n, x, tip }) {
  const line = svg("line", { y1: top, y2: top + height, stroke: "var(--soft)", visibility: "hidden" });
  root.append(line);
  root.setAttribute("tabindex", 0);
  root.setAttribute("class", "guide");
  let at = 0;
  const show = (i, cx, cy) => {
    at = Math.min(n - 1, Math.max(0, i));
    for (const end of ["x1", "x2"]) line.setAttribute(end, x(at));
    line.setAttribute("visibility", "visible");
    const box = root.getBoundingClientRect();
    showTip(tip(at), cx ?? box.left + x(at), cy ?? box.top + top + 20);
  };
  const hide = () => { line.setAttribute("visibility", "hidden"); showTip(); };
  for (const kind of ["pointermove", "pointerdown"]) root.addEventListener(kind, event => {
    const px = event.clientX - root.getBoundingClientRect().left;
    show(n > 1 ? Math.round((px - left) / (right - left) * (n - 1)) : 0, event.clientX, event.clientY);
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", event => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: n - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
  byId(id).replaceChildren(root);
}

// Share of all values that are at most so large. A series is { name, look, values }.
function distribution(id, { series, most, label }) {
  const w = width(id), left = 56, right = w - 14, top = 10, height = 200, root = chart(w, top + height + 40, label);
  const x = v => left + (right - left) * level(v, most), y = share => top + height * (1 - share);
  for (const share of [0, 0.25, 0.5, 0.75, 1])
    root.append(svg("line", { x1: left, x2: right, y1: y(share), y2: y(share), stroke: "var(--line)" }),
      text(left - 6, y(share) + 4, `${share * 100} %`, "end"));
  let last = -1e9;
  for (const t of levelTicks(most)) {
    root.append(svg("line", { x1: x(t), x2: x(t), y1: top, y2: top + height, stroke: "var(--line)" }));
    if (x(t) - last < 40) continue;
    last = x(t) + (t === 1.001 ? 20 : 0);
    root.append(text(x(t), top + height + 16, t === 1.001 ? "≤ 1.001" : t, t === 1.001 ? "start" : "middle"));
  }
  root.append(text((left + right) / 2, top + height + 34, "imbalance at most"));
  for (const s of series) {
    const sorted = s.values.filter(finite).sort((a, b) => a - b);
    let path = `M${x(1)} ${y(0)}`;
    sorted.forEach((v, i) => { path += `H${x(v).toFixed(1)}V${y((i + 1) / sorted.length).toFixed(1)}`; });
    root.append(svg("path", { d: `${path}H${right}`, fill: "none", ...look(s.look) }));
  }
  byId(id).replaceChildren(root);
}

// Home rank of each expert: in order, the first ranks have one more where it does not divide.
function homes(experts, ranks) {
  const each = Math.floor(experts / ranks), more = experts % ranks, out = [];
  for (let r = 0; r < ranks; r++) for (let i = 0; i < each + (r < more ? 1 : 0); i++) out.push(r);
  return out;
}

// What each rank computes: experts at home less what their replicas take, then the replicas.
function stacks(experts, ranks, replicas) {
  const home = homes(experts.length, ranks), left = experts.slice(), out = Array.from({ length: ranks }, () => []);
  for (const [expert, , tokens] of replicas) left[expert] -= tokens;
  left.forEach((tokens, expert) => out[home[expert]].push({ expert, tokens }));
  for (const [expert, rank, tokens] of replicas) out[rank].push({ expert, tokens, from: home[expert] });
  return out;
}
const total = stack => sum(stack.map(part => part.tokens));

// Ranks as stacked bars of experts.
function bars(id, stacked, most, label) {
  const left = 56, top = 18, height = 220, bw = Math.max(7, Math.min(120, (width(id) - left - 8) / stacked.length));
  const right = left + bw * stacked.length, root = chart(right + 8, top + height + 38, label), gap = bw > 24 ? 3 : 1;
  const y = yAxis(root, { left, right, top, height, low: 0, high: most, count: 4 }), mean = sum(stacked.map(total)) / stacked.length;
  const every = Math.ceil(24 / bw), over = [];
  stacked.forEach((stack, rank) => {
    let below = 0;
    stack.forEach((part, i) => {
      if (part.tokens <= 0) return;
      const replica = part.from !== undefined, tall = y(below) - y(below + part.tokens);
      root.append(svg("rect", { x: left + bw * rank + gap, y: y(below + part.tokens), width: bw - 2 * gap, height: Math.max(0.5, tall),
        stroke: "var(--page)", "stroke-width": 0.5, fill: replica ? "url(#hatch)" : i % 2 ? "var(--home-b)" : "var(--home-a)",
        "data-tip": `rank ${rank}, expert ${part.expert}${replica ? `\nreplica; its home is rank ${part.from}` : ""}\n${number(part.tokens)} token copies` }));
      if (tall >= 13 && bw >= 34 && !replica)
        root.append(svg("text", { x: left + bw * (rank + 0.5), y: y(below + part.tokens / 2) + 4, "text-anchor": "middle", class: "on-bar",
          "pointer-events": "none" }, part.expert));
      below += part.tokens;
    });
    if (bw >= 44) over.push(text(left + bw * (rank + 0.5), y(below) - 5, mean > 0 ? `${fixed(below / mean, 2)} ×` : "", "middle", "ink"));
    if (rank % every === 0) root.append(text(left + bw * (rank + 0.5), top + height + 15, rank));
  });
  root.append(svg("line", { x1: left, x2: right, y1: y(mean), y2: y(mean), stroke: "var(--mean)", "stroke-width": 2, "stroke-dasharray": "5 3",
    "pointer-events": "none" }), ...over);
  root.append(text((left + right) / 2, top + height + 32, "rank (height: token copies)"));
  byId(id).replaceChildren(root);
}

// `rows` are [name, function of a run] or [name] for a heading; one column a run.
function table(id, runs, rows) {
  const node = document.createElement("table"), head = node.createTHead().insertRow(), body = node.createTBody();
  const cell = (name, content, scope) => Object.assign(element(name, content), scope ? { scope } : {});
  head.append(element("td", ""), ...runs.map(run => cell("th", run.balance, "col")));
  for (const [name, of] of rows) {
    const row = body.insertRow(), head = cell("th", name, of ? "row" : "rowgroup");
    if (of) row.append(head, ...runs.map(run => element("td", of(run))));
    else { row.className = "part"; head.colSpan = runs.length + 1; row.append(head); }
  }
  byId(id).replaceChildren(node);
}
const facts = (id, list) => byId(id).replaceChildren(...list.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));

// A select or slider with its label; `options` are [value, name].
function select(label, options, change) {
  const box = document.createElement("select"), wrap = element("label", label);
  for (const [value, name] of options) box.add(new Option(name, value));
  box.addEventListener("change", () => change(+box.value));
  wrap.append(box);
  return { wrap, set: value => { box.value = value; } };
}
function slider(label, most, change) {
  const box = Object.assign(document.createElement("input"), { type: "range", min: 1, max: most, step: 1 }), name = element("span", "");
  const wrap = element("label", [name, box], "wide");
  box.addEventListener("input", () => change(+box.value));
  return { wrap, set: value => { box.value = value; name.textContent = `${label} ${value} of ${most}`; } };
}

const TIMING = {
  wall: "wall (time on the clock)",
  "critical-path": "critical-path (ranks compute one after another; a step takes the sum over its phases of the slowest rank)",
};
const BALANCER = { none: "none (nothing is moved)", exact: "exact (replicas by exact load)", ideal: "ideal (forced balanced routing)" };

// Draws now and whenever the width or the colour scheme changes.
function keepDrawn(draw) {
  let timer;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(draw, 150); });
  dark.addEventListener("change", draw);
  draw();
}
