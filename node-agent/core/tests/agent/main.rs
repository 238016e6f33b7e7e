//! Tests of `AgentCore` against a simulated environment: engines, devices, peers and a directory that execute
//! its effects in random order, with errors, crashes and delays.
//!
//! The payload of a block is modelled as one number per layer, and its checksums as functions of that number.
//! The harness thus detects every read of bytes that were not committed under the key, without moving bytes.
//! `AgentCore::audit` runs after every event.
//!
//! Replay one seed of the random tests: `REPRISE_SEED=<seed> cargo test -p reprise-agent-core --test agent`.

mod chain_client;
mod descriptions;
mod disk;
mod engine;
mod extent_client;
mod fuzz;
mod harness;
mod jobs;
mod memory;
mod peers;
mod pool_damage;
mod pool_golden;
mod pool_growth;
mod pool_harness;
mod pool_power_loss;
mod pool_protocol;
mod pool_scale;
mod power_loss;
mod public;
mod random;
mod rng;
mod scenarios_admission;
mod scenarios_attachment;
mod scenarios_begun;
mod scenarios_chains;
mod scenarios_demotion;
mod scenarios_devices;
mod scenarios_erasure;
mod scenarios_extent_limits;
mod scenarios_extents;
mod scenarios_inbound;
mod scenarios_integrity;
mod scenarios_load;
mod scenarios_moves;
mod scenarios_origin;
mod scenarios_outbound;
mod scenarios_peers;
mod scenarios_prefetch;
mod scenarios_public;
mod scenarios_ranks;
mod scenarios_regions;
mod scenarios_retention;
mod scenarios_rotation;
mod scenarios_save;
mod scenarios_scale;
mod scenarios_shares;
mod scenarios_slack;
mod scenarios_tenants;
mod speed;
