use burn::lr_scheduler::LrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use burn_moe::layer::ConfigError;

/// Course of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScheduleKind {
    /// Stays.
    Constant,
    /// Falls along a cosine to this share of itself (arXiv 1608.03983, without restarts).
    Cosine {
        /// Rate at the end over rate at the start.
        end: f64,
    },
}

/// Learning rates of a run. In the first `warmup` steps the rate rises in equal steps, from `1 /
/// warmup` of `lr` to `lr`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScheduleConfig {
    /// Course after the warm-up.
    pub kind: ScheduleKind,
    /// Highest rate.
    pub lr: f64,
    /// Steps of the run.
    pub steps: usize,
    /// Steps of the warm-up.
    pub warmup: usize,
}

impl ScheduleConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Self {
            kind,
            lr,
            steps,
            warmup,
        } = *self;
        ConfigError::check(lr > 0.0 && lr <= 1.0, "lr", lr, "more than 0, at most 1")?;
        ConfigError::check(steps > 0, "steps", steps, "1 or more")?;
        ConfigError::check(
            warmup < steps,
            "warmup",
            warmup,
            format!("less than steps ({steps})"),
        )?;
        match kind {
            ScheduleKind::Constant => Ok(()),
            ScheduleKind::Cosine { end } => {
                ConfigError::check((0.0..=1.0).contains(&end), "end", end, "from 0 to 1")
            }
        }
    }

    /// Creates the schedule, one rate a step.
    ///
    /// # Errors
    ///
    /// When [`validate`](Self::validate) finds a fault.
    pub fn init(&self) -> Result<ModuleLrScheduler, ConfigError> {
        self.validate()?;
        let Self {
            kind,
            lr,
            steps,
            warmup,
        } = *self;
        let after: LrSchedulerConfig = match kind {
            ScheduleKind::Constant => lr.into(),
            ScheduleKind::Cosine { end } => {
                CosineAnnealingLrSchedulerConfig::new(lr, steps - warmup)
                    .with_min_lr(lr * end)
                    .into()
            }
        };
        let (mut parts, mut milestones) = (vec![after], Vec::new());
        if warmup > 0 {
            let rise = match warmup {
                1 => lr.into(),
                _ => LinearLrSchedulerConfig::new(lr / warmup as f64, lr, warmup - 1).into(),
            };
            parts.insert(0, rise);
            milestones.push(warmup);
        }
        let schedule = SequentialLrSchedulerConfig::new(parts, milestones);
        schedule.init().map_err(|allowed| ConfigError {
            field: "schedule",
            value: format!("{self:?}"),
            allowed,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: ScheduleKind, steps: usize, warmup: usize) -> Vec<f64> {
        let config = ScheduleConfig {
            kind,
            lr: 0.4,
            steps,
            warmup,
        };
        let mut schedule = config.init().unwrap();
        (0..steps).map(|_| schedule.step().base()).collect()
    }

    fn assert_close(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() < 1e-12, "{got} {want}");
        }
    }

    #[test]
    fn a_warm_up_rises_in_equal_steps() {
        let constant = |warmup| rates(ScheduleKind::Constant, 6, warmup);
        assert_close(&constant(0), &[0.4; 6]);
        assert_close(&constant(1), &[0.4; 6]);
        assert_close(&constant(4), &[0.1, 0.2, 0.3, 0.4, 0.4, 0.4]);
    }

    #[test]
    fn a_cosine_falls_after_it() {
        let got = rates(ScheduleKind::Cosine { end: 0.1 }, 10, 2);
        let cosine = (0..8).map(|i| {
            let angle = f64::from(i) / 8.0 * std::f64::consts::PI;
            0.04 + 0.36 * (1.0 + angle.cos()) / 2.0
        });
        let want: Vec<f64> = [0.2, 0.4].into_iter().chain(cosine).collect();
        assert_close(&got, &want);
    }

    #[test]
    fn faults_are_named() {
        let config = ScheduleConfig {
            kind: ScheduleKind::Cosine { end: 0.1 },
            lr: 0.1,
            steps: 5,
            warmup: 0,
        };
        config.validate().unwrap();
        let refused = |config: ScheduleConfig| match config.init() {
            Err(error) => error.field,
            Ok(_) => panic!("{config:?} is allowed"),
        };
        let lr = |lr| ScheduleConfig { lr, ..config };
        assert_eq!(refused(lr(0.0)), "lr");
        assert_eq!(refused(lr(1.5)), "lr");
        assert_eq!(refused(lr(f64::NAN)), "lr");
        assert_eq!(refused(ScheduleConfig { steps: 0, ..config }), "steps");
        assert_eq!(
            refused(ScheduleConfig {
                warmup: 5,
                ..config
            }),
            "warmup"
        );
        let kind = ScheduleKind::Cosine { end: 1.1 };
        assert_eq!(refused(ScheduleConfig { kind, ..config }), "end");
    }
}
