"use strict";
const runs = data.runs, byName = name => runs.find(run => run.balance === name), main = byName("exact") || runs[0];
const tokens = data.batch * data.sequence_length;
// A resumed run has the losses of all its steps, everything else from here on.
const skipped = data.first_step || 0, padded = values => [...Array(skipped).fill(NaN), ...values];
// Each group of ranks that share experts has all layers, one group behind the other.
const dp = data.dp || 1, groupRanks = data.ranks / dp, layers = runs[0].layers;
const groupOf = i => Math.floor(i / (layers.length / dp));
const groupName = group => `group ${group} (ranks ${group * groupRanks} to ${(group + 1) * groupRanks - 1})`;
const layerName = i => `${layers[i] ?? "–"}${dp === 1 ? "" : `, ${groupName(groupOf(i))}`}`;
const state = { run: runs.indexOf(main), layer: 0, step: 1 };
const worst = largest([1.01, ...runs.flatMap(run => [run.imbalance_before.max, run.imbalance_after.max])]);
const listed = list => list.map(run => ({ name: run.balance, look: run.balance, run }));

function lead() {
  const out = [], { imbalance_before: before, imbalance_after: after } = main, none = byName("none");
  if (main.balance === "exact")
    out.push(`With ${data.planner} planning, the slowest rank computed ${fixed(after.mean, 3)} times the mean of ${dp === 1 ? "all ranks" : "its group"}; without, it would have been ${fixed(before.mean, 3)} times.`);
  const ratios = runs.filter(run => run.balance !== "ideal" && finite(run.ratio_to_ideal));
  if (ratios.length)
    out.push(`Throughput as a ratio of ideal: ${ratios.map(run => `${run.balance} ${fixed(run.ratio_to_ideal, 3)}`).join(", ")}.`);
  if (none && none !== main) {
    const most = largest(main.loss.map((loss, i) => Math.abs(loss - none.loss[i])));
    if (finite(most)) out.push(`The losses of ${main.balance} and none differ by at most ${most < 1e-3 ? most.toExponential(1) : fixed(most, 3)} bits per ${data.unit}.`);
  }
  byId("lead").textContent = out.join(" ");
}

function settings() {
  const c = data.config;
  facts("facts", [
    ["Config", `${data.config_name}: ${c.num_layers} layers (${c.num_dense_layers} dense), width ${c.d_model}; ${c.num_experts} experts of width ${c.d_hidden_expert} in ${c.n_group} groups, top ${c.top_k} of ${c.topk_group} groups, ${c.num_shared_experts} shared`],
    ["Parameters", number(data.parameters)],
    ["Ranks", `${dp === 1 ? data.ranks : `${dp} x ${groupRanks}, data times expert parallel`}, each with ${number(c.num_experts / groupRanks)} experts${data.nodes ? `, on ${data.nodes} nodes` : ""}${data.hierarchical ? ", tokens between nodes in two hops" : ""}`],
    ["Replica slots", `${data.slots} a rank, shared by all layers`],
    ["Planner", `${data.planner} (used by exact)`],
    ["Balancers", runs.map(run => BALANCER[run.balance] || run.balance).join("; ")],
    ["Timing", TIMING[data.timing] || data.timing],
    ["Data", data.data],
    ["A step", `${number(data.batch)} sequences of ${number(data.sequence_length)} tokens: ${number(tokens)} tokens`],
    ["Steps", skipped ? `${number(data.steps)}, resumed after ${number(skipped)}` : number(data.steps)],
    ["Seed", String(data.seed)],
  ]);
  byId("config").textContent = JSON.stringify(c, null, 1);
  const buffer = run => fixed(largest([0, ...run.replica_buffer_bytes]) / 1024, 0);
  const three = (name, key) => [[name], ["mean", r => fixed(r[key].mean, 3)], ["95th percentile", r => fixed(r[key].p95, 3)], ["worst", r => fixed(r[key].max, 3)]];
  table("table", runs, [
    [`Bits per ${data.unit}`], ["first step", r => fixed(r.loss[0], 3)], ["last step", r => fixed(r.loss.at(-1), 3)],
    ["Throughput"], ["tokens per second", r => number(r.tokens_per_second)], ["ratio to ideal", r => fixed(r.ratio_to_ideal, 3)],
    ...three("Imbalance before", "imbalance_before"), ...three("Imbalance after", "imbalance_after"),
    ["Planning of a layer"], ["copies, mean", r => fixed(r.copies_per_plan.mean, 1)],
    ["µs, median", r => fixed(r.planning_us.p50, 1)], ["µs, 95th percentile", r => fixed(r.planning_us.p95, 1)],
    ["Moved in a step's forward pass"], ["MB of tokens", r => fixed(r.bytes_dispatched_per_step / 1e6, 2)],
    ["MB of expert weights", r => fixed(r.bytes_replicated_per_step / 1e6, 2)],
    ["Memory"], ["KB of replicas, largest rank", buffer],
  ]);
}

function curves() {
  const chartOf = (id, series, options) => { lines(id, { series, ...options }); lineKey(`${id}-key`, series); };
  chartOf("loss", listed(runs).map(s => ({ ...s, values: s.run.loss })), { digits: 3, unit: `bits per ${data.unit}`,
    label: `Loss over steps. ${runs.map(r => `${r.balance}: ${fixed(r.loss[0], 2)} to ${fixed(r.loss.at(-1), 2)}`).join("; ")}` });
  chartOf("speed", listed(runs).map(s => ({ ...s, values: padded(s.run.step_seconds.map(seconds => tokens / seconds)) })), { from: 0, digits: 0,
    unit: "tokens per second", label: `Throughput over steps. Median: ${runs.map(r => `${r.balance} ${number(r.tokens_per_second)}`).join(", ")} tokens per second` });
  const at = side => run => run.imbalance.map(layers => layers.map(pair => pair[side])), after = at(1), before = at(0);
  const series = runs.map(run => ({ name: run.balance, look: run.balance, layers: after(run) }));
  // Without a run that moves nothing, what balancing started from.
  if (!byName("none") && main.balance === "exact") series.unshift({ name: "exact, before", look: "before", layers: before(main) });
  chartOf("over", series.map(s => ({ ...s, values: padded(s.layers.map(average)), ...(skipped ? {} : { band: [s.layers.map(smallest), s.layers.map(largest)] }) })), { from: 1,
    digits: 3, unit: "imbalance", label: `Imbalance over steps. Mean: ${runs.map(r => `${r.balance} ${fixed(r.imbalance_after.mean, 3)}`).join(", ")}` });
  const spread = series.map(s => ({ ...s, values: s.layers.flat() }));
  distribution("spread", { series: spread, most: worst,
    label: `Distribution of imbalance. 95th percentile: ${runs.map(r => `${r.balance} ${fixed(r.imbalance_after.p95, 3)}`).join(", ")}` });
  lineKey("spread-key", spread);
}

const set = change => { Object.assign(state, change); choice(); };
const controls = [
  select("Balancer", runs.map((run, i) => [i, run.balance]), run => set({ run })),
  select("Layer", layers.map((_, i) => [i, `layer ${layerName(i)}`]), layer => set({ layer })),
  slider(skipped ? `Step after ${skipped}` : "Step", Math.max(1, data.steps - skipped), step => set({ step })),
];

// A column of the heat map is as many steps as it takes to keep columns wide enough; it shows the worst of them.
function heatMaps(run) {
  const steps = run.imbalance.length, per = Math.ceil(steps / Math.max(1, Math.floor((width("heat-before") - 50) / 8)));
  const columns = Array.from({ length: Math.ceil(steps / per) }, (_, i) => {
    const first = i * per + 1, last = Math.min(steps, first + per - 1);
    return { name: first + skipped, first, last, tip: first === last ? `step ${first + skipped}` : `worst of steps ${first + skipped} to ${last + skipped}` };
  });
  for (const [side, id] of ["heat-before", "heat-after"].entries()) {
    const of = (layer, { first, last }) => run.imbalance.slice(first - 1, last).map(step => step[layer][side]);
    heat(id, { rows: dp === 1 ? layers : layers.map((layer, i) => `${groupOf(i)}·${layer}`), columns, most: worst,
      rowName: dp === 1 ? "layer" : "group·layer", columnName: "step",
      label: `Imbalance ${side ? "after" : "before"} balancing of ${layers.length} layers in ${steps} steps, mean ${fixed((side ? run.imbalance_after : run.imbalance_before).mean, 3)}`,
      cell: (layer, i) => largest(of(layer, columns[i])), chosen: [state.layer, Math.floor((state.step - 1) / per)],
      choose: (layer, i) => { const values = of(layer, columns[i]); set({ layer, step: columns[i].first + Math.max(0, values.indexOf(largest(values))) }); } });
  }
  byId("heat-note").textContent = `Choose a cell to see its ranks below.${per > 1 ? ` A column is ${per} steps and shows the worst of them.` : ""}`;
}

function rankLoads(run) {
  const kept = run.loads.map((layers, i) => layers.length ? i + 1 : 0).filter(Boolean), layer = layerName(state.layer);
  // The nearest step whose loads are on this page.
  const step = kept.reduce((a, b) => Math.abs(b - state.step) < Math.abs(a - state.step) ? b : a, kept[0]);
  const loads = step && run.loads[step - 1][state.layer];
  byId("bars-title").textContent = `Ranks in layer ${layer} of step ${(step ?? state.step) + skipped}, ${run.balance}`;
  byId("bars-note").textContent = kept.length < run.loads.length ? "To keep this page small, it has the loads of some steps only; the nearest is shown. All are in report.json." : "";
  if (!loads) return;
  const [before, after] = run.imbalance[step - 1][state.layer], all = stacks(loads.experts, groupRanks, []);
  const now = stacks(loads.experts, groupRanks, loads.replicas), most = Math.max(1, ...all.map(total), ...now.map(total)) * 1.02;
  const copies = loads.replicas.length, note = `${copies} ${copies === 1 ? "copy" : "copies"}`;
  byId("bars-before-title").textContent = `Before: imbalance ${fixed(before, 3)}`;
  byId("bars-after-title").textContent = `After: imbalance ${fixed(after, 3)}, with ${note}`;
  bars("bars-before", all, most, `Token copies of each rank before balancing: ${all.map(total).join(", ")}`);
  bars("bars-after", now, most, `Token copies of each rank after balancing, with ${note}: ${now.map(total).join(", ")}`);
}

function choice() {
  const run = runs[state.run];
  controls.forEach((control, i) => control.set([state.run, state.layer, state.step][i]));
  heatMaps(run);
  rankLoads(run);
}

// Starts at the worst cell before balancing.
const every = main.imbalance.flatMap((layers, step) => layers.map(([before], layer) => ({ before, layer, step: step + 1 })));
const hottest = every.reduce((a, b) => b.before > a.before ? b : a, { before: 0, layer: 0, step: 1 });
Object.assign(state, { layer: hottest.layer, step: hottest.step });
byId("controls").replaceChildren(...controls.map(control => control.wrap));
lead();
settings();
keepDrawn(() => { curves(); scale("scale", worst); choice(); });
