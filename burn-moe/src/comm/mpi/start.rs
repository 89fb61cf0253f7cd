//! The beginning: MPI is initialised, and every rank learns who is on which machine.

use std::ffi::{c_int, c_void};

use mpi::ffi;
use mpi::{Threading, initialize_with_threading};

use super::engine::Engine;
use super::requests::{Failure, ok};

/// Which ranks are on which node, and a text of rank 0 that all have got.
pub(super) struct Started {
    pub engine: Engine,
    /// The lowest rank on the node of each rank.
    pub nodes: Vec<usize>,
    pub host: String,
}

/// Initialises MPI. Every process of the world must call it, once.
pub(super) fn start() -> Result<Started, Failure> {
    let (universe, threading) = initialize_with_threading(Threading::Serialized)
        .ok_or_else(|| Failure("MPI has already been initialised in this process".into()))?;
    if threading < Threading::Serialized {
        return Err(Failure(format!(
            "the MPI library gives threads only {threading:?}, needed is Serialized"
        )));
    }
    let host = mpi::environment::processor_name().map_err(|error| Failure(error.to_string()))?;
    // SAFETY: MPI is initialised; all out-pointers are to initialised locals that outlive the calls.
    unsafe {
        let mut comm = ffi::RSMPI_COMM_NULL;
        ok(ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, &mut comm))?;
        ok(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
        let (mut rank, mut size) = (0, 0);
        ok(ffi::MPI_Comm_rank(comm, &mut rank))?;
        ok(ffi::MPI_Comm_size(comm, &mut size))?;
        let nodes = nodes(comm, rank, size)?;
        let engine = Engine::new(universe, comm, rank as usize, size as usize)?;
        Ok(Started {
            engine,
            nodes,
            host,
        })
    }
}

/// The lowest rank that shares memory with each rank.
///
/// # Safety
///
/// MPI must be initialised and `comm` valid.
unsafe fn nodes(comm: ffi::MPI_Comm, rank: c_int, size: c_int) -> Result<Vec<usize>, Failure> {
    // SAFETY: as promised by the caller; the buffers have the announced sizes.
    unsafe {
        let mut node = ffi::RSMPI_COMM_NULL;
        ok(ffi::MPI_Comm_split_type(
            comm,
            ffi::RSMPI_COMM_TYPE_SHARED,
            rank,
            ffi::RSMPI_INFO_NULL,
            &mut node,
        ))?;
        let mut lowest = rank as u32;
        let int = ffi::RSMPI_UINT32_T;
        let first = (&raw mut lowest).cast::<c_void>();
        ok(ffi::MPI_Bcast(first, 1, int, 0, node))?;
        let mut all = vec![0u32; size as usize];
        let gathered = all.as_mut_ptr().cast::<c_void>();
        ok(ffi::MPI_Allgather(
            first.cast_const(),
            1,
            int,
            gathered,
            1,
            int,
            comm,
        ))?;
        ok(ffi::MPI_Comm_free(&mut node))?;
        Ok(all.into_iter().map(|rank| rank as usize).collect())
    }
}
