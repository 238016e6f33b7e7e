//! Whether a tenant can detect by timing which prompts another tenant has stored.
//!
//! Probes of two groups of prompts alternate in random order, so that the load of the machine affects both alike. A rank
//! sum test compares the times. By chance, it finds a difference in 1 of 100 comparisons of equal distributions, so a
//! leak is a difference in each of three rounds.

use std::time::Instant;

use rand::RngExt as _;
use rand::rngs::StdRng;
use reprise_client::{Client, ConnectOptions, LoadRequest, Scope};
use reprise_e2e::control_plane::Store;
use reprise_e2e::rank_sum::{Z_AT_P_001, standard_score};
use reprise_e2e::seed::{print_line, seeded};
use reprise_e2e::{Agent, AgentConfig, PATIENCE, TestEnv, wait_until};
use reprise_policy::{BlockKey, ByteSize, NamespaceDigest, TenantName};
use reprise_testkit::configuration;
use reprise_testkit::engine as reference;

use super::tenants::{prompts, reference_engine};

/// Prompts that the victim has stored, and as many that it has not; each has one block.
const STORED: std::ops::Range<u64> = 1..257;
const ABSENT: std::ops::Range<u64> = 1001..1257;

/// Probes of each group in a round.
const PROBES: usize = 10_000;

/// Rounds that must all find a difference.
const ROUNDS: usize = 3;

/// A session that probes for prompts.
struct Prober {
    client: Client,
    stored: Vec<BlockKey>,
    absent: Vec<BlockKey>,
}

impl Prober {
    /// Opens a session of a tenant that derives the keys of all prompts.
    fn of(agent: &Agent, tenant: &TenantName) -> Prober {
        let socket = &agent.files().socket;
        configuration::provide_salt(socket, tenant).expect("the folder is the test's");
        let options = ConnectOptions::new(socket, reference::namespace(&prompts()), prompts());
        let client = Client::connect(options.tenant(tenant.clone())).expect("a session");
        let [stored, absent] = [STORED, ABSENT].map(|numbers| keys(client.namespace(), numbers));
        Prober { client, stored, absent }
    }

    /// Returns the nanoseconds of one probe: a look-up, then an attempt to load.
    fn probe(&self, key: BlockKey) -> u64 {
        let request = LoadRequest { deadline: PATIENCE, ..LoadRequest::new(vec![key]) };
        let started = Instant::now();
        let _found = self.client.match_keys(&request.keys, Scope::Cluster).expect("answered");
        let _load = self.client.load(&request).expect("answered");
        u64::try_from(started.elapsed().as_nanos()).expect("a short time")
    }

    /// Returns the standard score of a round; positive if probes for stored prompts take longer.
    fn round(&self, what: &str, random: &mut StdRng) -> f64 {
        let (mut stored, mut absent) = (Vec::with_capacity(PROBES), Vec::with_capacity(PROBES));
        for _ in 0..PROBES {
            let mut one_of = |keys: &[BlockKey]| keys[random.random_range(0..keys.len())];
            let (one, other) = (one_of(&self.stored), one_of(&self.absent));
            if random.random() {
                stored.push(self.probe(one));
                absent.push(self.probe(other));
            } else {
                absent.push(self.probe(other));
                stored.push(self.probe(one));
            }
        }
        let score = standard_score(&stored, &absent);
        print_line(&format!("probes {what}: standard score {score:.2}, {PROBES} of each group"));
        score
    }
}

fn keys(namespace: &NamespaceDigest, prompts: std::ops::Range<u64>) -> Vec<BlockKey> {
    prompts.flat_map(|prompt| reference::chain_keys(namespace, &[prompt])).collect()
}

#[test]
fn a_tenant_cannot_detect_by_timing_which_prompts_another_one_has_stored() {
    let env = TestEnv::new();
    let member = env.control_plane(Store::Memory);
    let config = |name: &str| AgentConfig {
        arena: ByteSize(64 << 20),
        control_plane: vec![member.address().to_owned()],
        ..AgentConfig::named(name)
    };
    let (own, peer) = (env.agent(&config("own")), env.agent(&config("peer")));
    let [attacker, victim] = ["team-a", "team-b"].map(|name| name.parse::<TenantName>().expect("a name"));
    let mut random = seeded("timing");
    // The victim's blocks are on the attacker's node, and on another one.
    for agent in [&own, &peer] {
        let mut engine = reference_engine(agent, &victim);
        for prompt in STORED {
            engine.run(&[prompt]).expect("served");
        }
        engine.await_durable().expect("durable");
    }
    // The same probes find the difference without isolation: in a session of the victim's own tenant.
    let inside = Prober::of(&own, &victim);
    wait_until("the directory has the blocks", PATIENCE, || {
        let found = inside.client.match_keys(&inside.stored, Scope::Cluster).expect("answered");
        (found.len() == inside.stored.len()).then_some(())
    });
    assert!(inside.round("without isolation", &mut random).abs() > Z_AT_P_001);
    drop(inside);
    let outside = Prober::of(&own, &attacker);
    let finds = (0..ROUNDS).all(|_| outside.round("of another tenant", &mut random).abs() > Z_AT_P_001);
    assert!(!finds, "another tenant detects stored prompts by timing");
}
