//! Random reports of engines about the layers that they compute, and waits for durable commits.

use reprise_agent_core::event::{Event, Request};
use reprise_policy::SessionId;
use reprise_policy::slack::{LayerSlack, Phase, WriteSlack};

use crate::engine::RequestKind;
use crate::environment::Environment;
use crate::node::Node;
use crate::outcomes::Outcomes;
use crate::rng::Rng;
use crate::setup::large_layout;

/// Simulations with reports, in thousandths.
const REPORTS_PERMILLE: u64 = 500;
/// Distinguishes the random numbers of reports from all others of the seed. With this number, the seeds that found bugs,
/// and those that find rare flaws, have no reports.
const REPORTS_STREAM: u64 = 0x51ac_0474_1b67;

/// Actions of an engine, in thousandths, after which it reports a computation, and after which it waits for a commit.
const REPORT_PERMILLE: u64 = 150;
const AWAIT_PERMILLE: u64 = 20;

/// Returns the random numbers of reports; `None` if the simulation of the seed has none.
pub(crate) fn begin_reports(seed: u64) -> Option<Rng> {
    let mut random = Rng::new(seed ^ REPORTS_STREAM);
    random.chance(REPORTS_PERMILLE).then_some(random)
}

impl Node {
    /// Lets an engine report a computation, or wait until its latest commit is durable, sometimes.
    pub(crate) fn drive_layers(&mut self, env: &mut Environment, session: SessionId) {
        let Some(random) = &mut env.layers else { return };
        let reported = random.chance(REPORT_PERMILLE).then(|| draw_slack(random));
        let awaits = random.chance(AWAIT_PERMILLE);
        if let Some(slack) = reported {
            env.count("layer reports");
            let mut out = Outcomes::default();
            out.event(Event::LayerReported { session, slack });
            self.run(env, out);
        }
        let Some(process) = self.process.as_mut().filter(|_| awaits) else { return };
        let Some(engine) = process.engines.sessions.get(&session) else { return };
        if let Some(ticket) = engine.tickets.keys().next_back().copied() {
            env.count("commits awaited");
            let body = Request::AwaitDurable { ticket };
            process.engines.ask(env, session, RequestKind::Other, body);
        }
    }
}

/// Draws what a profile admits: no profile, no computation, or windows from nothing to a few blocks.
fn draw_slack(random: &mut Rng) -> Option<WriteSlack> {
    let slot = large_layout().slot_bytes();
    let phase = random.one_of(&[Phase::Prefill, Phase::Decode]);
    let cycle_micros = random.micros(1_000..20_000).as_micros() as u32;
    let bytes_max = slot * random.below(4) as u64;
    let bytes = random.one_of(&[0, slot, 2 * slot]).min(bytes_max);
    match random.below(10) {
        0 => None,
        1 => Some(WriteSlack::Idle),
        2 => Some(WriteSlack::Unrestricted),
        _ => Some(WriteSlack::Layers(LayerSlack { phase, cycle_micros, bytes, bytes_max })),
    }
}
