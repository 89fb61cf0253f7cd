use super::{LoadMatrix, Placement, Plan, Planner};

/// No balancing: every token copy is computed at its expert's home. The baseline.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoBalance;

impl Planner for NoBalance {
    fn name(&self) -> &'static str {
        "none"
    }

    fn plan(&mut self, _: &LoadMatrix, _: &Placement, _: usize, plan: &mut Plan) {
        plan.clear();
    }
}
