//! Ranks as processes over TCP do what threads do, and miss one that is killed.

mod common;

use common::world::{Engine, a_killed_process_is_missed_and_the_run_resumed, same_bits};

#[test]
fn losses_are_those_of_threads_to_the_bit() {
    let engines = [Engine::Threads, Engine::Tcp];
    same_bits(&engines, 2, &["--steps", "3"]);
    same_bits(&engines, 4, &["--steps", "3", "--dp", "2"]);
}

#[test]
fn a_killed_process_is_missed() {
    // Rank 0 writes the manifests.
    a_killed_process_is_missed_and_the_run_resumed(Engine::Tcp, &[2, 0]);
}
