//! Tests of `AgentCore` against a simulated world: engines, devices, peers and a directory that do what the core
//! wants in random order, with errors, deaths and delays.
//!
//! A block's bytes are modelled as one number per layer, and its checksums as functions of that number, so that the
//! world sees whenever anybody would have read bytes that were not committed under the key, without moving bytes.
//! `AgentCore::audit` runs after every event.
//!
//! Replay one seed of the random tests: `REPRISE_SEED=<seed> cargo test -p reprise-agent-core --test agent`.

mod described;
mod disk;
mod engine;
mod jobs;
mod memory;
mod peers;
mod power_loss;
mod random;
mod rng;
mod scenarios_attached;
mod scenarios_chains;
mod scenarios_devices;
mod scenarios_giving;
mod scenarios_load;
mod scenarios_moving;
mod scenarios_origin;
mod scenarios_peers;
mod scenarios_save;
mod scenarios_scale;
mod scenarios_suspect;
mod scenarios_taking;
mod scenarios_tenants;
mod speed;
mod world;
