//! CASCADE: the hit rates and the scaling whose tables the paper left empty, on traces.
//!
//! The replay has no time, so figures are hit rates, bytes and writes. A node has the DRAM that the paper gives it, in
//! blocks of Llama 70B with the tokens of the trace.

use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::EvictionKind;

use super::super::super::replay::{
    Cluster, Counts, IdScope, NodeSettings, Replay, Sharing, Trace, replay_opt,
};
use super::super::profiles::{GB, Model};
use super::cascade_traces::{Synthetic, TURN_BLOCKS, TURNS};
use super::{CASCADE, Choice, Claim, Figure, NamedTrace, Position, Report, Traces};

/// Bytes of DRAM of a node for blocks (section III-B: /dev/shm).
const DRAM_BYTES: u64 = 128_000_000_000;

/// Numbers of nodes, and multiples of a node's DRAM. The paper plans 4, 16, 64 and 256 nodes.
const NODES: [u16; 4] = [1, 4, 16, 64];

/// Nodes of the ablation.
const ABLATION_NODES: u16 = 4;

/// Multiples of a node's DRAM for the tier behind it, in the comparison of admission rules.
const STORE_MULTIPLE: u64 = 16;

/// Sessions of the agentic trace that share a node.
const AGENTIC_SESSIONS: [u32; 4] = [15, 30, 60, 120];

/// Sessions of each system prompt of the synthetic workload.
const SESSIONS: [u32; 4] = [1, 5, 20, 50];

/// System prompts of the synthetic workload (section IV-A: 20 to 100).
const PROMPTS: [u32; 2] = [20, 100];

/// Lengths of system prompts (table II).
const PREFIXES: [(&str, u32); 2] = [("2K", 2_048), ("8K", 8_192)];

/// Places of the paper.
const TABLE_3: &str = "table III, hit rate";
const TABLE_5: &str = "table V, ablation";
const FIGURE_3: &str = "figure 3, scaling";
const WORKLOAD: &str = "section IV-A, synthetic";
const ALGORITHM_1: &str = "section III-C, admission";

/// A trace with the model whose blocks it has.
struct Subject<'a> {
    name: &'a str,
    trace: &'a Trace,
    block_bytes: u64,
}

/// Configuration of a replay.
#[derive(Clone, Copy)]
struct Setup {
    policy: EvictionKind,
    nodes: u16,
    sharing: Sharing,
    /// DRAM of a node, as a multiple of the paper's.
    dram: u64,
    /// Tier behind DRAM, as a multiple of a node's DRAM.
    store: u64,
    admission: AdmissionMode,
}

/// One node with the paper's DRAM.
const ONE_NODE: Setup = Setup {
    policy: EvictionKind::Lru,
    nodes: 1,
    sharing: Sharing::Peers,
    dram: 1,
    store: 0,
    admission: AdmissionMode::Always,
};

/// Runs the experiments on these traces.
pub fn report(traces: &Traces) -> Report {
    let model = Model::named("llama-3-70b").expect("a built-in model is valid");
    let conversation = Subject::new("conversation", &traces.conversation.trace, &model);
    let agentic = Subject::new("agentic", &traces.agentic.trace, &model);
    let workload = Synthetic { prompts: 100, prefix_tokens: 8_192, sessions: 50 };
    let (shared, own) = (workload.trace(IdScope::Trace), workload.trace(IdScope::Session));
    let synthetic = Subject::new("synthetic 8K", &shared, &model);
    let by_session = Subject::new("synthetic 8K", &own, &model);
    let mut report = Report {
        name: CASCADE,
        title: "CASCADE: Content-Addressed Tiered KV Cache Storage for HPC-Scale LLM Inference",
        figures: stated(&model),
        choices: choices(traces, &model),
        positions: positions(),
        limits: limits(),
        ..Report::default()
    };
    for subject in [&conversation, &agentic, &synthetic] {
        let pooled = report.policies(subject);
        report.scaling(subject, &pooled);
    }
    report.sharers(&model);
    report.agentic_sharers(&traces.agentic.trace, &model);
    report.ablation(&synthetic, &by_session);
    report.admission(&conversation);
    report.admission(&agentic);
    report
}

/// Sizes that the paper states, from the production layout.
fn stated(model: &Model) -> Vec<Figure> {
    let token = model.kv_bytes_per_token() as f64;
    vec![
        Figure::new("equation 2", "KV cache of a token of Llama 70B", "bytes", (327_680.0, token)),
        Figure::new(
            "section II-A",
            "KV cache of a context of 128K tokens",
            "GiB",
            (40.0, token * 131_072.0 / f64::from(1 << 30)),
        ),
        Figure::new("equation 5", "block of 256 tokens", "MB", (82.0, token * 256.0 / 1e6)),
    ]
}

impl<'a> Subject<'a> {
    fn new(name: &'a str, trace: &'a Trace, model: &Model) -> Subject<'a> {
        Subject { name, trace, block_bytes: model.kv_bytes_per_token() * trace.block_tokens() }
    }

    /// Blocks in the DRAM of a node.
    fn node_blocks(&self) -> u64 {
        DRAM_BYTES / self.block_bytes
    }

    fn replay(&self, setup: Setup) -> Replay {
        let dram_blocks = self.node_blocks() * setup.dram;
        let settings = NodeSettings {
            policy: setup.policy.into(),
            dram_blocks,
            nvme_blocks: dram_blocks * setup.store,
            admission: setup.admission,
            block_bytes: self.block_bytes,
            block_tokens: self.trace.block_tokens(),
            tenants: 1,
        };
        Cluster::with_sharing(setup.nodes, settings, setup.sharing).replay(self.trace)
    }

    fn hit_percent(&self, setup: Setup) -> f64 {
        percent(&self.replay(setup).counts)
    }
}

fn percent(counts: &Counts) -> f64 {
    counts.hits() as f64 * 100.0 / counts.references.max(1) as f64
}

impl Report {
    /// Adds a figure that the paper leaves empty, and returns its value.
    fn empty(&mut self, place: &str, quantity: String, unit: &'static str, ours: f64) -> f64 {
        self.figures.push(Figure::unpublished(place, quantity, unit, ours));
        ours
    }

    fn hits(&mut self, place: &str, subject: &Subject<'_>, what: &str, setup: Setup) -> f64 {
        self.events += subject.trace.references();
        self.empty(place, format!("{}: hit rate, {what}", subject.name), "%", subject.hit_percent(setup))
    }

    fn claim(&mut self, place: &'static str, claim: &'static str, (is_confirmed, ours): (bool, String)) {
        self.claims.push(Claim { place, claim, ours, is_confirmed });
    }

    /// Hit rate by policy over capacities, with the bound of any policy. Returns the hit rates of lru.
    fn policies(&mut self, subject: &Subject<'_>) -> Vec<f64> {
        let (mut lru, mut semantic) = (Vec::new(), Vec::new());
        for dram in NODES.map(u64::from) {
            let name = |policy: &str| format!("{policy}, DRAM of {dram} nodes in one");
            let of = |policy| Setup { policy, dram, ..ONE_NODE };
            lru.push(self.hits(TABLE_3, subject, &name("lru"), of(EvictionKind::Lru)));
            semantic.push(self.hits(TABLE_3, subject, &name("semantic"), of(EvictionKind::Semantic)));
            let counts = replay_opt(subject.trace, subject.node_blocks() * dram);
            let bound = counts.hits as f64 * 100.0 / counts.references.max(1) as f64;
            self.empty(TABLE_3, format!("{}: hit rate, {}", subject.name, name("opt")), "%", bound);
        }
        let is_confirmed = lru.iter().zip(&semantic).all(|(lru, semantic)| semantic >= lru);
        let ours = format!("{}: semantic {} %, lru {} %", subject.name, list(&semantic), list(&lru));
        self.claim(
            "section III-C, equation 4",
            "Eviction that protects shared prefixes keeps them accessible: the hit rate is not below that of lru.",
            (is_confirmed, ours),
        );
        lru
    }

    /// Hit rate over the number of nodes, with and without reads from peers. `pooled` are those of one node with the
    /// DRAM of all.
    fn scaling(&mut self, subject: &Subject<'_>, pooled: &[f64]) {
        let (mut peers, mut alone) = (Vec::new(), Vec::new());
        for nodes in NODES {
            let setup = Setup { nodes, ..ONE_NODE };
            let counts = subject.replay(setup).counts;
            self.events += subject.trace.references();
            let name = |what: &str| format!("{}: {what}, {nodes} nodes", subject.name);
            peers.push(self.empty(FIGURE_3, name("hit rate with peers"), "%", percent(&counts)));
            let isolated = Setup { sharing: Sharing::None, ..setup };
            let hits = self.hits(FIGURE_3, subject, &format!("without peers, {nodes} nodes"), isolated);
            alone.push(hits);
            let from_peers = (counts.hits_peer_dram + counts.hits_peer_nvme) * subject.block_bytes;
            let per_request = from_peers as f64 / counts.requests.max(1) as f64 / GB;
            self.empty(FIGURE_3, name("read from peers for each request"), "GB", per_request);
        }
        let name = subject.name;
        let grows = peers.is_sorted() && peers.last() > peers.first();
        self.claim(
            "section IV-F",
            "The hit rate improves with scale (larger distributed cache).",
            (grows, format!("{name}: {} % with {} nodes", list(&peers), list(&NODES.map(f64::from)))),
        );
        let is_aggregate = peers.iter().zip(pooled).all(|(peers, pooled)| *peers >= 0.95 * pooled);
        self.claim(
            "section III-B, tier 3",
            "The aggregate capacity is 128 GB times the number of nodes.",
            (
                is_aggregate,
                format!(
                    "{name}: {} % with nodes, {} % with one node of their DRAM",
                    list(&peers),
                    list(pooled)
                ),
            ),
        );
        let (with, without) = (peers.last().copied(), alone.last().copied());
        let (with, without) = (with.unwrap_or_default(), without.unwrap_or_default());
        self.claim(
            "section II-E, 2",
            "Access to remote DRAM creates a third tier: nodes hit more with it than without.",
            (with > without, format!("{name}: {with:.1} % with peers, {without:.1} % without, 64 nodes")),
        );
    }

    /// Hit rate over the sessions that share a system prompt, on one node.
    fn sharers(&mut self, model: &Model) {
        for (length, prefix_tokens) in PREFIXES {
            for (prompts, sessions) in
                PROMPTS.into_iter().flat_map(|prompts| SESSIONS.map(|count| (prompts, count)))
            {
                let trace = Synthetic { prompts, prefix_tokens, sessions }.trace(IdScope::Trace);
                let name = format!("{length}, {prompts} prompts, {sessions} sessions each");
                let subject = Subject::new(&name, &trace, model);
                for policy in [EvictionKind::Lru, EvictionKind::Semantic] {
                    self.hits(WORKLOAD, &subject, policy.name(), Setup { policy, ..ONE_NODE });
                }
            }
        }
    }

    /// Hit rate over the sessions that share a node without sharing blocks.
    fn agentic_sharers(&mut self, trace: &Trace, model: &Model) {
        for sessions in AGENTIC_SESSIONS.into_iter().filter(|sessions| *sessions <= trace.sessions()) {
            let part = trace.of_sessions(sessions);
            let subject = Subject::new("agentic", &part, model);
            for policy in [EvictionKind::Lru, EvictionKind::Semantic] {
                let what = format!("{}, {sessions} sessions on one node", policy.name());
                self.hits(TABLE_3, &subject, &what, Setup { policy, ..ONE_NODE });
            }
        }
    }

    /// Table V: hit rate without each of the mechanisms.
    fn ablation(&mut self, shared: &Subject<'_>, by_session: &Subject<'_>) {
        let full = Setup { policy: EvictionKind::Semantic, nodes: ABLATION_NODES, ..ONE_NODE };
        let mut of = |subject: &Subject<'_>, what: &str, setup| {
            self.hits(TABLE_5, subject, &format!("{what}, {ABLATION_NODES} nodes"), setup)
        };
        let all = of(shared, "full", full);
        let own_ids = of(by_session, "without content-addressed ids", full);
        let alone = of(shared, "without remote DRAM", Setup { sharing: Sharing::None, ..full });
        let lru = of(shared, "without semantic eviction", Setup { policy: EvictionKind::Lru, ..full });
        let ours = format!(
            "{}: {all:.1} % in full, {own_ids:.1} % without shared ids, {alone:.1} % without remote DRAM, {lru:.1} % \
             with lru",
            shared.name
        );
        self.claim(
            "section IV-E",
            "Content-addressed ids provide the largest improvement for workloads that share prefixes.",
            (own_ids <= alone.min(lru), ours),
        );
    }

    /// Hit rate and writes by the rule that admits blocks to the tier behind DRAM.
    fn admission(&mut self, subject: &Subject<'_>) {
        for admission in AdmissionMode::ALL {
            let counts = subject.replay(Setup { store: STORE_MULTIPLE, admission, ..ONE_NODE }).counts;
            self.events += subject.trace.references();
            let name = |what: &str| format!("{}: {what}, {}", subject.name, admission.name());
            self.empty(ALGORITHM_1, name("hit rate"), "%", percent(&counts));
            let written = counts.nvme_written as f64 * 100.0 / counts.references.max(1) as f64;
            self.empty(ALGORITHM_1, name("blocks written for 100 references"), "blocks", written);
        }
    }
}

fn list(values: &[f64]) -> String {
    values
        .iter()
        .map(|value| super::rounded((value * 10.0).round() / 10.0).to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

fn choices(traces: &Traces, model: &Model) -> Vec<Choice> {
    let choice = |parameter, value: String, reason| Choice { parameter, value, reason };
    let size = |named: &NamedTrace| {
        let trace = &named.trace;
        let blocks = Subject::new("", trace, model).node_blocks();
        format!(
            "{}: {} requests, {} references to {} blocks of {} tokens; a node has {blocks}",
            named.name,
            trace.requests().len(),
            trace.references(),
            trace.distinct(),
            trace.block_tokens()
        )
    };
    vec![
        choice(
            "conversation trace",
            size(&traces.conversation),
            "ShareGPT, which the paper names, has no arrivals; this trace has the ids of shared prefixes",
        ),
        choice(
            "agentic trace",
            size(&traces.agentic),
            "OpenOrca, which the paper names, has single requests; these sessions have up to hundreds",
        ),
        choice(
            "model and DRAM",
            "Llama 70B, 128 GB for blocks on each node".to_owned(),
            "sections III-B and IV-A; HBM is not modelled, because the engine uses it",
        ),
        choice(
            "synthetic sessions",
            format!("{TURNS} turns of {TURN_BLOCKS} blocks, a minute apart, all starts within an hour"),
            "means of ShareGPT (PagedAttention, figure 11); the paper states prompts and sessions only",
        ),
        choice(
            "nodes",
            "all requests of a session on one node; requests without a session at random".to_owned(),
            "the paper does not state how requests are routed",
        ),
        choice(
            "tier behind DRAM",
            format!("{STORE_MULTIPLE} times the DRAM, on the node"),
            "for admission only: the file system of the paper keeps everything, so its hits do not depend on a policy",
        ),
    ]
}

fn positions() -> Vec<Position> {
    vec![
        Position {
            contradiction: "An id is the hash of key and value data, yet a lookup by it is to save their computation.",
            side: "Ours is the hash of the tokens and all tokens before them, which is known before the computation.",
        },
        Position {
            contradiction: "An aggregated file has up to 256 blocks and about 80 MB, but one block has 82 MB.",
            side: "Ours follows the size of a block, 256 tokens of 320 KiB.",
        },
        Position {
            contradiction: "A file operation takes 10 to 50 ms, but table I reads files of 42 KB at 233 MB/s: 0.18 ms each.",
            side: "None is needed: a replay has no times.",
        },
        Position {
            contradiction: "Table I calls 42 KB a block of 32 tokens, but 32 tokens of Llama 70B have 10.5 MB.",
            side: "Ours takes bytes from the layout of the model.",
        },
        Position {
            contradiction: "Ids of LMCache and Mooncake are called session-specific, but both hash the tokens of a prefix.",
            side: "The ablation without content-addressed ids models what the paper states, not these systems.",
        },
    ]
}

fn limits() -> Vec<String> {
    [
        "Deduplication (tables II and III) needs content ids of stored blocks and comes with the cold tier.",
        "TTFT and throughput (tables III and V) are not part of this report: a replay has no time.",
        "Throughput per file and aggregated (table I), hash times (VI) and MPI (VII) are measurements of a machine.",
        "Block aggregation changes the time of reads, not hits, so table V has no figure without it.",
        "The rule expected_reuse admits no block: with the costs that agents assume, a block of Llama 70B takes longer to \
         read from a device than to compute.",
        "256 nodes of figure 3 are not replayed: the traces have too few requests for a node.",
    ]
    .map(str::to_owned)
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isolated_nodes_compute_prefixes_again_that_nodes_with_peers_read() {
        let model = Model::named("llama-3-70b").expect("valid");
        let trace = Synthetic { prompts: 2, prefix_tokens: 8_192, sessions: 20 }.trace(IdScope::Trace);
        let subject = Subject::new("synthetic", &trace, &model);
        let replay = |sharing| subject.replay(Setup { nodes: 4, sharing, ..ONE_NODE }).counts;
        let (peers, none) = (replay(Sharing::Peers), replay(Sharing::None));
        // Each prompt is computed by one node with peers, and by up to four without.
        let again = none.references - none.hits() - (peers.references - peers.hits());
        assert!(none.hits_peer_dram == 0 && peers.hits_peer_dram > 0);
        assert!((32..=2 * 3 * 32).contains(&again) && again.is_multiple_of(32), "{again} blocks");
    }

    #[test]
    fn ids_of_sessions_share_nothing_and_hit_only_the_turns_of_a_session() {
        let model = Model::named("llama-3-70b").expect("valid");
        let workload = Synthetic { prompts: 2, prefix_tokens: 2_048, sessions: 10 };
        let hits = |scope| {
            let trace = workload.trace(scope);
            Subject::new("synthetic", &trace, &model).replay(ONE_NODE).counts.hits()
        };
        // With shared ids, each session but the first of a prompt also hits the 8 blocks of its prompt at first.
        assert_eq!(hits(IdScope::Trace) - hits(IdScope::Session), 2 * 9 * 8);
    }
}
