"use strict";
const state = { group: 0, planner: null, slots: null, cell: 0 };
const planners = [...new Set(data.groups.flatMap(g => g.series.map(s => s.planner)))];
const COLOURS = ["#8b97a3", "#a07f45", "#c2a765", "#2f7ebc", "#3a9a63", "#8cc9a1", "#9a6fc1", "#c3a5dc", "#d1495b", "var(--ink)"];
const DASHES = ["none", "7 3", "2 3"];

const group = () => data.groups[state.group];
const series = () => group().series.find(s => s.planner === state.planner && s.slots === state.slots);
const worst = () => largest([...group().before, ...group().series.flatMap(s => s.after)]);
const hottest = () => group().before.indexOf(largest(group().before));
const names = () => [...new Set(group().series.map(s => s.planner))];
const slots = () => [...new Set(group().series.map(s => s.slots))];
const perRank = () => `${state.slots} slot${state.slots === 1 ? "" : "s"} on each rank`;

let controls;
const set = change => { Object.assign(state, change); render(); };
function choose(index) {
  state.group = index;
  state.cell = hottest();
  if (!names().includes(state.planner)) state.planner = names().includes("exact-fit") ? "exact-fit" : names().at(-1);
  if (!slots().includes(state.slots)) state.slots = slots()[0];
  const workload = ({ workload, ep }) => workload.includes(`EP${ep}`) ? workload : `EP${ep}: ${workload}`;
  const made = [
    [select("Workload", data.groups.map((g, i) => [i, workload(g)]), i => { choose(i); render(); }), () => state.group],
    [select("Planner", names().map((name, i) => [i, name]), i => set({ planner: names()[i] })), () => names().indexOf(state.planner)],
    [select("Slots on each rank", slots().map(n => [n, n]), n => set({ slots: n })), () => state.slots],
    [select("Layer and micro-batch", group().cells.map(([l, m], i) => [i, `layer ${l}, micro-batch ${m}`]), i => set({ cell: i })), () => state.cell],
  ];
  // The first stays, to keep the focus; its options are always the same.
  if (controls) made[0] = controls[0];
  controls = made;
  const box = byId("controls");
  while (box.children.length > 1) box.lastChild.remove();
  box.append(...made.slice(box.children.length).map(([control]) => control.wrap));
}

function heatMap(id, values, label) {
  const { cells } = group(), layers = [...new Set(cells.map(c => c[0]))], batches = [...new Set(cells.map(c => c[1]))];
  const at = new Map(cells.map(([l, m], i) => [`${l} ${m}`, i])), [layer, batch] = cells[state.cell];
  const index = (r, c) => at.get(`${layers[r]} ${batches[c]}`);
  heat(id, { rows: layers, columns: batches.map(m => ({ name: m, tip: `micro-batch ${m}` })), most: worst(), rowName: "layer",
    columnName: "micro-batch", label, chosen: [layers.indexOf(layer), batches.indexOf(batch)], cell: (r, c) => values[index(r, c)],
    choose: (r, c) => set({ cell: index(r, c) ?? state.cell }), least: 9, digits: 4 });
}

function ranks() {
  const g = group(), s = series(), [layer, batch] = g.cells[state.cell], plan = s.plans[state.cell], loads = g.loads[state.cell];
  byId("bars-title").textContent = `Ranks in layer ${layer}, micro-batch ${batch}`;
  byId("bars-before-title").textContent = `Without replicas: ${g.before[state.cell]}`;
  const before = stacks(loads, g.ep, []), most = Math.max(1, largest(before.map(total))) * 1.02;
  bars("bars-before", before, most, `Token copies of each rank without replicas: ${before.map(total).join(", ")}`);
  if (plan === null) {
    byId("bars-after-title").textContent = `${s.planner}: ${s.after[state.cell]} (the plan was not kept, to keep this page small)`;
    byId("bars-after").replaceChildren();
    return;
  }
  const replicas = Array.from({ length: plan.length / 3 }, (_, i) => plan.slice(3 * i, 3 * i + 3)), after = stacks(loads, g.ep, replicas);
  byId("bars-after-title").textContent = `${s.planner}: ${s.after[state.cell]} with ${replicas.length} ${replicas.length === 1 ? "copy" : "copies"}`;
  bars("bars-after", after, Math.max(most, largest(after.map(total)) * 1.02), `Token copies of each rank with ${s.planner}: ${after.map(total).join(", ")}`);
}

function curves() {
  const lines = group().series.filter(s => s.slots === state.slots).map(s => {
    const i = planners.indexOf(s.planner), chosen = s.planner === state.planner;
    return { name: s.planner, chosen, values: s.after,
      look: { stroke: COLOURS[i % COLOURS.length], "stroke-width": chosen ? 3.5 : 1.8, "stroke-dasharray": DASHES[i % DASHES.length] } };
  });
  distribution("curves", { series: [...lines].sort((a, b) => a.chosen - b.chosen), most: worst(),
    label: `Distribution of imbalance of ${lines.map(s => s.name).join(", ")} with ${perRank()}; figures are in the summary below` });
  lineKey("curves-key", lines);
  byId("curves-note").textContent = `Share of all layers and micro-batches, ${perRank()}; further left is better.`;
}

function summary() {
  const g = group(), table = document.createElement("table");
  const heads = ["planner", "slots", "before", "mean", "p50", "p95", "max", "copies", "most", "remote", "plan µs p50", "p95", "step µs"];
  table.createTHead().insertRow().append(...heads.map(h => Object.assign(element("th", h), { scope: "col" })));
  const body = table.createTBody();
  for (const r of data.rows.filter(r => r.workload === g.workload && r.ep === g.ep)) {
    const row = body.insertRow();
    if (r.planner === state.planner && r.slots === state.slots) row.className = "chosen";
    for (const value of [r.planner, r.slots_used > r.slots ? `(${r.slots_used})` : r.slots, fixed(r.before.mean, 3),
      fixed(r.mean, 4), fixed(r.p50, 4), fixed(r.p95, 4), fixed(r.max, 4), fixed(r.copies_mean, 1), r.copies_max,
      fixed(r.remote_fraction, 3), fixed(r.plan_us_p50, 1), fixed(r.plan_us_p95, 1), fixed(r.step_us, 1)])
      row.insertCell().textContent = value;
  }
  byId("summary").replaceChildren(table);
}

function render() {
  for (const [control, value] of controls) control.set(value());
  byId("heat-title").textContent = `With ${state.planner}, ${perRank()}`;
  scale("scale", worst());
  heatMap("heat-before", group().before, "Imbalance of every layer and micro-batch without replicas");
  heatMap("heat-after", series().after, `Imbalance of every layer and micro-batch with ${state.planner}`);
  ranks();
  curves();
  summary();
}
choose(0);
keepDrawn(render);
