//! Requests that the MPI library works on, and what it says when it fails.

use std::ffi::c_int;
use std::ptr;

use mpi::ffi;

/// What the MPI library said.
#[derive(Debug, Clone)]
pub(super) struct Failure(pub String);
/// Requests under way, each with what belongs to it.
pub(super) struct Requests<T> {
    requests: Vec<ffi::MPI_Request>,
    owners: Vec<T>,
}

impl<T> Default for Requests<T> {
    fn default() -> Self {
        Self {
            requests: Vec::new(),
            owners: Vec::new(),
        }
    }
}

impl<T> Requests<T> {
    pub fn push(&mut self, request: ffi::MPI_Request, owner: T) {
        self.requests.push(request);
        self.owners.push(owner);
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Takes out what is complete.
    pub fn completed(&mut self) -> Result<Vec<T>, Failure> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let mut done: Vec<c_int> = vec![0; self.requests.len()];
        let mut count = 0;
        // SAFETY: `done` has a place for each request.
        unsafe {
            ok(ffi::MPI_Testsome(
                self.requests.len() as c_int,
                self.requests.as_mut_ptr(),
                &mut count,
                done.as_mut_ptr(),
                ffi::RSMPI_STATUSES_IGNORE,
            ))?;
        }
        // Undefined, a negative number, when there is no active request.
        done.truncate(usize::try_from(count).unwrap_or(0));
        // From the end, so that the places of the others stay. The order of completion is of no matter.
        done.sort_unstable_by(|a, b| b.cmp(a));
        Ok(done
            .into_iter()
            .map(|at| {
                self.requests.swap_remove(at as usize);
                self.owners.swap_remove(at as usize)
            })
            .collect())
    }
}

/// The library's own words for an error code.
pub(super) fn ok(code: c_int) -> Result<(), Failure> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0u8; 1024];
    let mut len = 0;
    // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING of any implementation (512 at most).
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), ptr::from_mut(&mut len)) };
    text.truncate(usize::try_from(len).unwrap_or(0));
    Err(Failure(String::from_utf8_lossy(&text).into_owned()))
}
