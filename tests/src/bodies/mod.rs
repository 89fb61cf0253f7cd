//! Test bodies that run over any engine: the functions that `#[test]`s call on threads, and that
//! the binary `rank` calls in every process of an MPI world.

/// A test body and its name.
pub type Body = (&'static str, fn());

/// Lists the bodies of a file as its `ALL`.
macro_rules! bodies {
    ($($name:ident),* $(,)?) => {
        /// The bodies of this file.
        pub const ALL: &[$crate::bodies::Body] = &[$((stringify!($name), $name)),*];
    };
}

/// A `#[test]` for each body of a file of [`bodies`](crate::bodies), and one that none is missing.
#[macro_export]
macro_rules! tests_of {
    ($file:ident: $($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                $crate::bodies::$file::$name();
            }
        )*

        #[test]
        fn all_bodies_are_here() {
            let here = [$(stringify!($name)),*];
            let all = $crate::bodies::$file::ALL.iter().map(|(name, _)| *name);
            assert!(all.eq(here));
        }
    };
}

pub mod expert_parallel;
pub mod mesh;

/// All bodies of all files.
pub fn all() -> impl Iterator<Item = Body> {
    [expert_parallel::ALL, mesh::ALL].concat().into_iter()
}
