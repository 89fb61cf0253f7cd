"use strict";
const runs = data.runs, main = runs.find(run => run.balance === "exact") || runs[0];
const state = { run: runs.indexOf(main), layer: 0, pass: 0 }, passes = main.imbalance.length;

function settings() {
  const c = data.config, { imbalance_before: before, imbalance_after: after } = main;
  byId("lead").textContent = `${main.balance}: the first token behind every prompt was known after ${fixed(main.time_to_first_token * 1e3, 1)} ms. The slowest rank computed ${fixed(after.mean, 3)} times the mean of all ranks` +
    (main.balance === "exact" ? `; without balancing it would have been ${fixed(before.mean, 3)} times.` : ".");
  facts("facts", [
    ["Model", data.checkpoint],
    ["Config", `${c.num_layers} layers (${c.num_dense_layers} dense), width ${c.d_model}; ${c.num_experts} experts of width ${c.d_hidden_expert} in ${c.n_group} groups, top ${c.top_k} of ${c.topk_group} groups, ${c.num_shared_experts} shared`],
    ["Ranks", `${data.ranks}, each with ${number(c.num_experts / data.ranks)} experts`],
    ["Replica slots", `${data.slots} a rank, shared by all layers`],
    ["Planner", `${data.planner} (used by exact)`],
    ["Balancers", runs.map(run => BALANCER[run.balance] || run.balance).join("; ")],
    ["Timing", TIMING[data.timing] || data.timing],
    ["Prompts", `${number(main.continuations.length)}, together ${number(data.prompt_tokens)} tokens${data.tokens === "bytes" ? " (bytes)" : ""}`],
    ["Read", data.chunk === null ? "each prompt in one pass" : `in ${number(passes)} passes of at most ${number(data.chunk)} tokens of each prompt`],
    ["Written", `at most ${number(data.max_new_tokens)} tokens behind each prompt`],
  ]);
  byId("config").textContent = JSON.stringify(c, null, 1);
  const three = (name, key) => [[name], ["mean", r => fixed(r[key].mean, 3)], ["95th percentile", r => fixed(r[key].p95, 3)], ["worst", r => fixed(r[key].max, 3)]];
  table("table", runs, [
    ["Speed"], ["ms to first token", r => fixed(r.time_to_first_token * 1e3, 1)], ["prompt tokens per second", r => number(r.tokens_per_second)],
    ["new tokens per second", r => r.decode.tokens ? number(r.decode.tokens_per_second) : "–"],
    ...three("Imbalance before", "imbalance_before"), ...three("Imbalance after", "imbalance_after"),
    ["Imbalance of new tokens"], ["before, mean", r => r.decode.passes ? fixed(r.decode.imbalance_before.mean, 3) : "–"],
    ["after, mean", r => r.decode.passes ? fixed(r.decode.imbalance_after.mean, 3) : "–"],
    ["Planning of a layer"], ["copies, mean", r => fixed(r.copies_per_plan.mean, 1)],
    ["µs, median", r => fixed(r.planning_us.p50, 1)], ["µs, 95th percentile", r => fixed(r.planning_us.p95, 1)],
    ["Moved in a pass over the prompts"], ["MB of tokens", r => fixed(r.bytes_dispatched_per_step / 1e6, 2)],
    ["MB of expert weights", r => fixed(r.bytes_replicated_per_step / 1e6, 2)],
    ["Memory"], ["KB of replicas, largest rank", r => number(largest([0, ...r.replica_buffer_bytes]) / 1024)],
    ["KB of keys and values, largest rank", r => number(largest([0, ...r.kv_cache_bytes]) / 1024)],
  ]);
}

const set = change => { Object.assign(state, change); draw(); };
const controls = [
  select("Balancer", runs.map((run, i) => [i, run.balance]), run => set({ run })),
  select("Layer", runs[0].layers.map((layer, i) => [i, `layer ${layer}`]), layer => set({ layer })),
  ...(passes > 1 ? [select("Pass", main.imbalance.map((_, i) => [i, `${i + 1} of ${passes}`]), pass => set({ pass }))] : []),
];

// Two bars a layer, from 1, which is perfect.
function layerBars(run) {
  const pairs = run.imbalance[state.pass] || [], left = 56, top = 26, height = 200;
  const all = runs.flatMap(r => (r.imbalance[state.pass] || []).flat()), high = 1 + (Math.max(1.01, largest(all)) - 1) * 1.05;
  const bw = Math.max(16, Math.min(140, (width("layers") - left - 8) / Math.max(1, pairs.length))), right = left + bw * pairs.length;
  const root = chart(right + 8, top + height + 38, `Imbalance of each layer, ${run.balance}. ` +
    pairs.map(([before, after], i) => `Layer ${run.layers[i]}: ${fixed(before, 3)} before, ${fixed(after, 3)} after`).join("; "));
  const y = yAxis(root, { left, right, top, height, low: 1, high, count: 4 }), gap = bw > 40 ? 10 : 2, w = (bw - 2 * gap) / 2;
  pairs.forEach((pair, i) => {
    const x = left + bw * i, group = svg("g", { class: "cell", "data-tip": `layer ${run.layers[i]}\nbefore: ${fixed(pair[0], 3)}\nafter: ${fixed(pair[1], 3)}` });
    group.append(svg("rect", { x: x + 1, y: 2, width: bw - 2, height: top + height + 18, rx: 3, fill: "transparent",
      stroke: i === state.layer ? "var(--ink)" : "none", "stroke-width": 2 }));
    pair.forEach((value, side) => {
      const at = x + gap + w * side;
      group.append(svg("rect", { x: at, y: y(value), width: w - 1, height: Math.max(1.5, y(1) - y(value)), fill: side ? "var(--exact)" : "var(--none)" }));
      if (w >= 36) group.append(text(at + w / 2, y(value) - 5, fixed(value, 3), "middle", "ink"));
    });
    if (i % Math.ceil(20 / bw) === 0) group.append(text(x + bw / 2, top + height + 15, run.layers[i]));
    group.addEventListener("click", () => set({ layer: i }));
    root.append(group);
  });
  root.append(text((left + right) / 2, top + height + 34, "layer (height: imbalance, from 1)"));
  byId("layers").replaceChildren(root);
}

function rankLoads(run) {
  const loads = run.loads[state.pass]?.[state.layer];
  byId("bars-title").textContent = `Ranks in layer ${run.layers[state.layer] ?? "–"}, ${run.balance}`;
  byId("bars").style.display = loads ? "" : "none";
  if (!loads) return void (byId("bars-title").textContent += ": not kept in the page for this pass; see report.json");
  const [before, after] = run.imbalance[state.pass][state.layer], all = stacks(loads.experts, data.ranks, []);
  const now = stacks(loads.experts, data.ranks, loads.replicas), most = Math.max(1, ...all.map(total), ...now.map(total)) * 1.02;
  const copies = loads.replicas.length, note = `${copies} ${copies === 1 ? "copy" : "copies"}`;
  byId("bars-before-title").textContent = `Before: imbalance ${fixed(before, 3)}`;
  byId("bars-after-title").textContent = `After: imbalance ${fixed(after, 3)}, with ${note}`;
  bars("bars-before", all, most, `Token copies of each rank before balancing: ${all.map(total).join(", ")}`);
  bars("bars-after", now, most, `Token copies of each rank after balancing, with ${note}: ${now.map(total).join(", ")}`);
}

// Text whose control characters, and spaces at the ends of a line, can be seen.
function visible(content) {
  const node = element("pre", []);
  for (const part of content.split(/([\x00-\x1f\x7f]|^ +| +$)/m).filter(Boolean)) {
    if (/^ +$/.test(part)) { node.append(element("span", "·".repeat(part.length), "mark")); continue; }
    if (!/^[\x00-\x1f\x7f]$/.test(part)) { node.append(part); continue; }
    const code = part.charCodeAt(0), sign = { 9: "→", 10: "↵" }[code] || `\\x${code.toString(16).padStart(2, "0")}`;
    node.append(element("span", sign, "mark"), code === 10 || code === 9 ? part : "");
  }
  return node;
}

// Each prompt with what the runs wrote; runs that wrote the same share a line.
function prompts() {
  byId("prompts").replaceChildren(...main.continuations.map(({ prompt }, i) => {
    const box = element("div", [element("small", `Prompt ${i + 1}`), visible(prompt)], "prompt"), written = new Map();
    for (const run of runs) {
      const next = run.continuations[i]?.continuation ?? "";
      written.set(next, [...(written.get(next) || []), run.balance]);
    }
    for (const [next, names] of written) {
      const node = visible(next);
      node.className = "next";
      box.append(element("small", `Continued by ${names.join(", ")}`), node);
    }
    return box;
  }));
}

function draw() {
  const run = runs[state.run];
  controls.forEach((control, i) => control.set([state.run, state.layer, state.pass][i]));
  layerBars(run);
  rankLoads(run);
}

// Starts at the layer that is worst before balancing.
const first = (main.imbalance[0] || []).map(pair => pair[0]);
state.layer = Math.max(0, first.indexOf(largest(first)));
byId("controls").replaceChildren(...controls.map(control => control.wrap));
settings();
prompts();
keepDrawn(draw);
