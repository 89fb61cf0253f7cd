//! Expert parallelism changes nothing, over threads. Over processes: see `mpi.rs`.

burn_moe_tests::tests_of!(expert_parallel: skewed_load, one_expert_per_token, every_expert_for_every_token, all_tokens_on_one_expert, fewer_tokens_than_ranks, all_tokens_start_on_one_rank, groups_softmax_and_dropping, deep_and_thin_products, ideal_routing_is_balanced, two_runs_give_the_same_bits, two_nodes, early_weights_change_nothing);
