//! What a launcher tells its processes in environment variables.

use std::net::IpAddr;

/// This process' place among the processes of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This process' rank, from 0 to `world_size - 1`.
    pub rank: usize,
    /// How many processes there are.
    pub world_size: usize,
    /// This process' place among those of its machine: the number of its GPU.
    pub local_rank: usize,
    /// Name or address of the machine of rank 0.
    pub master_address: String,
    /// The port on which rank 0 waits for the others.
    pub master_port: u16,
    /// What all processes of the run know and strangers do not.
    pub secret: Option<String>,
}

/// A launcher's variables that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// No launcher's variables are there.
    #[error(
        "no rank: none of RANK, OMPI_COMM_WORLD_RANK and SLURM_PROCID is set; start one process a rank with torchrun, \
         mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )]
    NoLauncher,
    /// A variable that goes with those that are there.
    #[error("{variable} is not set, but {present} is")]
    Missing {
        /// The variable.
        variable: &'static str,
        /// One that is set.
        present: &'static str,
    },
    /// A variable without a usable value.
    #[error("{variable} = {value:?} must be {allowed}")]
    Invalid {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        allowed: String,
    },
}

/// Rank, number of ranks, rank within the machine, number of machines or of ranks on this one, by launcher.
const LAUNCHERS: [[&str; 3]; 3] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
];

/// The port that `torchrun` uses.
const PORT: u16 = 29500;

/// The variable with the secret.
pub(super) const SECRET: &str = "BURN_MOE_SECRET";

impl Launch {
    /// Reads the environment: `RANK`, `WORLD_SIZE`, `LOCAL_RANK` as `torchrun` sets them, or what `mpirun` of OpenMPI or
    /// Slurm's `srun` set; `MASTER_ADDR` (may be absent when all processes are on one machine), `MASTER_PORT` (29500
    /// when absent), and `BURN_MOE_SECRET`.
    ///
    /// # Errors
    ///
    /// [`LaunchError`] when they are not there, or not usable.
    pub fn from_env() -> Result<Self, LaunchError> {
        Self::from_lookup(&|variable| std::env::var(variable).ok())
    }

    /// [`from_env`](Self::from_env) from something else than the environment.
    ///
    /// # Errors
    ///
    /// As `from_env`.
    pub fn from_lookup(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, LaunchError> {
        let [rank_name, size_name, local_name] = LAUNCHERS
            .into_iter()
            .find(|[rank, ..]| get(rank).is_some())
            .ok_or(LaunchError::NoLauncher)?;
        let number = |variable: &'static str, least: usize, below: usize, allowed: &str| {
            let value = get(variable).ok_or(LaunchError::Missing {
                variable,
                present: rank_name,
            })?;
            let number = value.trim().parse().ok();
            number
                .filter(|n| (least..below).contains(n))
                .ok_or_else(|| LaunchError::Invalid {
                    variable,
                    value,
                    allowed: allowed.to_owned(),
                })
        };
        let world_size = number(size_name, 1, 1 << 20, "1 or more")?;
        let rank = number(
            rank_name,
            0,
            world_size,
            &format!("0 to {} ({size_name} - 1)", world_size - 1),
        )?;
        let local_rank = match get(local_name) {
            Some(_) => number(local_name, 0, world_size, "0 or more, below the ranks")?,
            None => rank,
        };
        let one_machine = world_size == 1
            || get("OMPI_COMM_WORLD_LOCAL_SIZE").is_some_and(|n| n == world_size.to_string())
            || get("SLURM_JOB_NUM_NODES").is_some_and(|n| n == "1")
            || get("LOCAL_WORLD_SIZE").is_some_and(|n| n == world_size.to_string());
        let master_address = match get("MASTER_ADDR").filter(|address| !address.is_empty()) {
            Some(address) => address,
            None if one_machine => "127.0.0.1".to_owned(),
            None => {
                return Err(LaunchError::Missing {
                    variable: "MASTER_ADDR",
                    present: rank_name,
                });
            }
        };
        let master_port = match get("MASTER_PORT") {
            None => PORT,
            Some(_) => number("MASTER_PORT", 1, 1 << 16, "1 to 65535")? as u16,
        };
        Ok(Self {
            rank,
            world_size,
            local_rank,
            master_address,
            master_port,
            secret: get(SECRET).filter(|secret| !secret.is_empty()),
        })
    }

    /// Whether all processes are certainly on this machine.
    pub(super) fn loopback(&self) -> bool {
        let address: Option<IpAddr> = self.master_address.parse().ok();
        self.master_address == "localhost" || address.is_some_and(|address| address.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Result<Launch, LaunchError> {
        Launch::from_lookup(&|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn launchers_are_understood() {
        let torchrun = launch(&[
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node-0"),
            ("MASTER_PORT", "1234"),
            ("BURN_MOE_SECRET", "s"),
        ]);
        let expected = Launch {
            rank: 5,
            world_size: 8,
            local_rank: 1,
            master_address: "node-0".into(),
            master_port: 1234,
            secret: Some("s".into()),
        };
        assert_eq!(torchrun, Ok(expected));
        let mpirun = launch(&[
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "3"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ])
        .unwrap();
        assert_eq!((mpirun.rank, mpirun.master_port), (3, PORT));
        assert!(mpirun.loopback());
        let srun = launch(&[
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_JOB_NUM_NODES", "1"),
        ])
        .unwrap();
        assert_eq!((srun.rank, srun.world_size), (0, 2));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        assert_eq!(launch(&[]), Err(LaunchError::NoLauncher));
        let names = |variables: &[(&str, &str)]| launch(variables).unwrap_err().to_string();
        assert_eq!(
            names(&[("RANK", "0")]),
            "WORLD_SIZE is not set, but RANK is"
        );
        let over = names(&[("RANK", "4"), ("WORLD_SIZE", "4")]);
        assert_eq!(over, "RANK = \"4\" must be 0 to 3 (WORLD_SIZE - 1)");
        let far = names(&[("RANK", "1"), ("WORLD_SIZE", "4")]);
        assert_eq!(far, "MASTER_ADDR is not set, but RANK is");
        let port = names(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "0"),
        ]);
        assert_eq!(port, "MASTER_PORT = \"0\" must be 1 to 65535");
    }
}
