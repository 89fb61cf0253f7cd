//! The report page: one self-contained HTML file that opens offline.

use super::measure::{Outcome, Row, Setting};
use burn_moe_examples::page;
use serde::Serialize;

/// The page stays small enough to open on a phone: once plans hold more numbers than this, later micro-batches keep their
/// imbalance but not their plans.
const PLAN_NUMBERS: usize = 600_000;

/// What the page shows, gathered while plans are made.
#[derive(Debug, Default)]
pub struct Recorder {
    groups: Vec<Group>,
    numbers: usize,
}

/// One workload at one number of ranks.
#[derive(Debug, Serialize)]
struct Group {
    workload: String,
    ep: usize,
    /// Layer and micro-batch of each cell of the heat map.
    cells: Vec<(usize, usize)>,
    before: Vec<f64>,
    /// Token copies of each expert, one list a cell.
    loads: Vec<Vec<u64>>,
    series: Vec<Series>,
}

/// One planner with one number of slots.
#[derive(Debug, Serialize)]
struct Series {
    planner: String,
    slots: usize,
    after: Vec<f64>,
    /// Expert, rank and quota of each replica in turn, one list a cell; null where the plan was not kept.
    plans: Vec<Option<Vec<u64>>>,
}

impl Recorder {
    /// Takes in one plan. Plans come micro-batch by micro-batch, each with all settings.
    pub fn plan(&mut self, workload: &str, setting: &Setting, outcome: &Outcome) {
        let ep = outcome.rank_load.len();
        let known = |g: &Group| g.ep == ep && g.workload == workload;
        if !self.groups.last().is_some_and(known) {
            self.groups.push(Group {
                workload: workload.to_owned(),
                ep,
                cells: Vec::new(),
                before: Vec::new(),
                loads: Vec::new(),
                series: Vec::new(),
            });
        }
        let Some(group) = self.groups.last_mut() else {
            return;
        };
        let cell = (outcome.layer, outcome.micro_batch);
        if group.cells.last() != Some(&cell) {
            group.cells.push(cell);
            group.before.push(rounded(outcome.before));
            group.loads.push(outcome.expert_load.to_vec());
        }
        if group.series.len() <= outcome.setting {
            group.series.push(Series {
                planner: setting.planner.clone(),
                slots: setting.slots,
                after: Vec::new(),
                plans: Vec::new(),
            });
        }
        let replicas = &outcome.plan.replicas;
        let keep = self.numbers + replicas.len() * 3 <= PLAN_NUMBERS;
        if keep {
            self.numbers += replicas.len() * 3;
        }
        let flat = replicas
            .iter()
            .flat_map(|r| [u64::from(r.expert), u64::from(r.rank), r.quota]);
        let series = &mut group.series[outcome.setting];
        series.after.push(rounded(outcome.after));
        series.plans.push(keep.then(|| flat.collect()));
    }
}

fn rounded(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}

/// Everything on the page.
#[derive(Debug, Serialize)]
pub struct Report<'a> {
    groups: Vec<Group>,
    rows: &'a [Row],
}

impl<'a> Report<'a> {
    pub fn new(recorder: Recorder, rows: &'a [Row]) -> Self {
        Self {
            groups: recorder.groups,
            rows,
        }
    }

    /// The page.
    pub fn html(&self) -> String {
        page::assemble(
            "Expert load balance",
            include_str!("report.html"),
            include_str!("report.js"),
            self,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_moe::balance::{Plan, Replica};

    #[test]
    fn the_page_needs_nothing_else_and_survives_odd_names() {
        let mut recorder = Recorder::default();
        let setting = Setting {
            planner: "none".to_owned(),
            slots: 1,
        };
        let replica = Replica {
            expert: 0,
            rank: 1,
            slot: 0,
            quota: 3,
        };
        recorder.plan(
            "</script><b>",
            &setting,
            &Outcome {
                setting: 0,
                layer: 0,
                micro_batch: 0,
                expert_load: &[6, 0],
                plan: &Plan {
                    replicas: vec![replica],
                },
                rank_load: &[3, 3],
                before: 2.0,
                after: 1.0,
            },
        );
        let page = Report::new(recorder, &[]).html();
        assert!(!page.contains("</script><b>") && page.contains("\\u003c/script>"));
        assert!(page.contains("\"plans\":[[0,1,3]]"));
        // The SVG namespace is a name, not a request.
        let requests = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!requests.contains("http") && !requests.contains("src="));
    }
}
