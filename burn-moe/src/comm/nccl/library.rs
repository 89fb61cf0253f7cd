//! NCCL's functions, from a library that is loaded at run time.
//!
//! Not through cudarc's own table: that looks for `libnccl.so` and names that NCCL has never had, but not for
//! `libnccl.so.2`, which is all that a machine without NCCL's header files has; it panics where it finds nothing; and its
//! Rust enums would not survive a result code that they do not know. Fifteen C functions, the same since NCCL 2.18, are
//! less trouble.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use super::NcclError;

/// An NCCL communicator.
pub(super) type NcclComm = *mut c_void;

/// What brings the ranks of a communicator together; rank 0 makes it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub [u8; UNIQUE_ID]);

/// Bytes of a [`UniqueId`].
pub(super) const UNIQUE_ID: usize = 128;

/// `ncclConfig_t` as of NCCL 2.18. Later libraries read as much of it as its size and version say.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Calls return at once, with [`IN_PROGRESS`] when there is more to do.
    pub fn not_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: OLDEST as u32,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// `ncclResult_t`, as it comes from C.
pub(super) type Code = c_int;
pub(super) const SUCCESS: Code = 0;
pub(super) const IN_PROGRESS: Code = 7;

/// `ncclUint8`.
pub(super) const BYTES: c_int = 1;

/// Version 2.18.0, in NCCL's numbering.
const OLDEST: c_int = 21800;
const OLDEST_NAME: &str = "2.18";

/// The variable that may name the library's file.
const VARIABLE: &str = "BURN_MOE_NCCL";

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

macro_rules! library {
    ($($(#[$doc:meta])* $name:ident: $symbol:literal, fn($($type:ty),*) -> $result:ty;)*) => {
        /// A loaded library.
        pub(super) struct Library {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($type),*) -> $result,)*
            /// Its version, in NCCL's numbering.
            pub version: c_int,
            /// Keeps the functions there.
            _library: libloading::Library,
        }

        impl Library {
            fn of(library: libloading::Library, name: &str) -> Result<Self, NcclError> {
                $(
                    // SAFETY: the type is the one that NCCL's header gives this function.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($type),*) -> $result>($symbol)
                    };
                    let $name = *$name.map_err(|_| NcclError::NoSymbol {
                        library: name.to_owned(),
                        symbol: $symbol,
                    })?;
                )*
                Ok(Self { $($name,)* version: 0, _library: library })
            }
        }
    };
}

library! {
    get_version: "ncclGetVersion", fn(*mut c_int) -> Code;
    get_unique_id: "ncclGetUniqueId", fn(*mut UniqueId) -> Code;
    comm_init_rank_config: "ncclCommInitRankConfig", fn(*mut NcclComm, c_int, UniqueId, c_int, *mut Config) -> Code;
    comm_get_async_error: "ncclCommGetAsyncError", fn(NcclComm, *mut Code) -> Code;
    comm_abort: "ncclCommAbort", fn(NcclComm) -> Code;
    comm_finalize: "ncclCommFinalize", fn(NcclComm) -> Code;
    comm_destroy: "ncclCommDestroy", fn(NcclComm) -> Code;
    group_start: "ncclGroupStart", fn() -> Code;
    group_end: "ncclGroupEnd", fn() -> Code;
    send: "ncclSend", fn(*const c_void, usize, c_int, c_int, NcclComm, *mut c_void) -> Code;
    recv: "ncclRecv", fn(*mut c_void, usize, c_int, c_int, NcclComm, *mut c_void) -> Code;
    error_string: "ncclGetErrorString", fn(Code) -> *const c_char;
    last_error: "ncclGetLastError", fn(NcclComm) -> *const c_char;
}

impl Library {
    /// Loads NCCL.
    ///
    /// # Errors
    ///
    /// When there is none, or none that works.
    pub fn load() -> Result<Arc<Self>, NcclError> {
        match std::env::var(VARIABLE) {
            Ok(path) if !path.is_empty() => Self::load_from(&[&path]),
            _ => Self::load_from(&NAMES),
        }
    }

    /// Loads NCCL from the first of these files that is there.
    pub fn load_from(names: &[&str]) -> Result<Arc<Self>, NcclError> {
        let mut tried = Vec::new();
        for name in names {
            // SAFETY: what a library of this name does when it is loaded is what it does in every program that uses it.
            match unsafe { libloading::Library::new(*name) } {
                Ok(library) => return Self::checked(library, name),
                Err(error) => tried.push(match std::error::Error::source(&error) {
                    // It names the file, or what that needs and lacks.
                    Some(reason) => reason.to_string(),
                    None => format!("{name}: {error}"),
                }),
            }
        }
        Err(NcclError::NoLibrary {
            tried,
            variable: VARIABLE,
        })
    }

    fn checked(library: libloading::Library, name: &str) -> Result<Arc<Self>, NcclError> {
        let mut library = Self::of(library, name)?;
        let mut version = 0;
        // SAFETY: `version` is there for the result.
        let code = unsafe { (library.get_version)(&mut version) };
        library.done("ncclGetVersion", code)?;
        if version < OLDEST {
            return Err(NcclError::TooOld {
                library: name.to_owned(),
                found: version_name(version),
                needed: OLDEST_NAME,
            });
        }
        library.version = version;
        Ok(Arc::new(library))
    }

    /// Two or more ranks meet under it.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; UNIQUE_ID]);
        // SAFETY: `id` is there for the result, and as large as NCCL's.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        self.done("ncclGetUniqueId", code)?;
        Ok(id)
    }

    /// The result of a call that is done when it returns.
    pub fn done(&self, call: &'static str, code: Code) -> Result<(), NcclError> {
        match code {
            SUCCESS => Ok(()),
            code => Err(NcclError::Call {
                call,
                message: self.message(code, std::ptr::null_mut()),
            }),
        }
    }

    /// What a result means, with NCCL's last words on it. `comm` may be null.
    pub fn message(&self, code: Code, comm: NcclComm) -> String {
        // SAFETY: both give static or thread-local texts that end in 0, for any code and for no communicator.
        let (meaning, last) = unsafe { ((self.error_string)(code), (self.last_error)(comm)) };
        let text = |pointer: *const c_char| {
            // SAFETY: as above, when it is not null.
            (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy())
        };
        let meaning = text(meaning).unwrap_or_default();
        match text(last).filter(|last| !last.trim().is_empty()) {
            Some(last) => format!("{meaning} ({code}): {}", last.trim()),
            None => format!("{meaning} ({code})"),
        }
    }
}

/// `2.28.3` for 22803.
pub(super) fn version_name(version: c_int) -> String {
    format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_what_was_tried() {
        let Err(error) = Library::load_from(&["libnccl-of-nobody.so.2", "/nowhere/libnccl.so"])
        else {
            panic!("a library of no one was loaded");
        };
        let text = error.to_string();
        for part in [
            "libnccl-of-nobody.so.2",
            "/nowhere/libnccl.so",
            "LD_LIBRARY_PATH",
            VARIABLE,
        ] {
            assert!(text.contains(part), "{part} is not in {text:?}");
        }
    }

    #[test]
    fn another_library_is_not_taken_for_nccl() {
        let Err(error) = Library::load_from(&["libc.so.6"]) else {
            panic!("the C library was taken for NCCL");
        };
        assert_eq!(
            error.to_string(),
            "libc.so.6 has no function ncclGetVersion"
        );
    }

    /// A real library works without a GPU as far as an id.
    #[test]
    #[ignore = "needs libnccl.so.2; BURN_MOE_NCCL may name it"]
    fn a_library_that_is_there_gives_ids() {
        let library = Library::load().unwrap_or_else(|error| panic!("{error}"));
        println!("NCCL {}", version_name(library.version));
        assert!(library.version >= OLDEST);
        let [a, b] = [(); 2].map(|()| {
            library
                .unique_id()
                .unwrap_or_else(|error| panic!("{error}"))
        });
        assert!(a.0 != b.0, "two ids are the same");
    }
}
