//! Data parallel times expert parallel, over threads. Over processes: see `mpi.rs`.

burn_moe_tests::tests_of!(mesh: every_grid_trains_as_one_rank, the_norm_counts_every_parameter_once);
