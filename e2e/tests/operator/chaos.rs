//! Random edits, deletions and faults, with two operators at once; then quiet, and it ends in what a fresh one makes, and so does the control plane
//! that they have told modes and budgets.
//!
//! Edits are of all kinds that people make, each made, changed and deleted again and again ([`People`]); what they come to in the end is drawn as well.
//! All that operators make is compared, and all that they say: conditions of every object, and finalizers; and what they have told the control plane.
//!
//! Faults: requests that are answered with 409 or 504, cut off before or after they are done, an API server that is started anew, operators that are
//! killed; a control plane that is killed, cannot be reached, or does what it is asked for and answers too late. An operator that loses its lease ends,
//! as it should, and is started again as a kubelet would.
//!
//! The seed decides all events, their order and number, and which request for an object gets which fault ([`script`]). It does not decide how far
//! the operators have come when an event happens: two runs of a seed differ in that.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, DynamicObject};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reprise_e2e::{Interposer, Operator, OperatorFiles, Relay, seed};
use serde_json::{Value, json};

use crate::convergence::{assert_writes_nothing, mark};
use crate::in_use::TOO_SHORT;
use crate::lab::{Lab, SPACE, SYSTEM};
use crate::outcome::{Outcome, assert_same, clear, outcome};
use crate::people::{LIMIT_BYTES, People};
use crate::plane::Plane;

const NAME: &str = "whatever_happens_they_end_in_what_a_fresh_one_makes_and_write_nothing_more";
/// Random events.
const EVENTS: usize = 80;
/// Pause between two of them, at most: operators are met at different points of their work.
const PAUSE_MS_MAX: u64 = 100;
/// Of a hundred requests so many get a fault while there are any.
const FAULTS_PERCENT: u32 = 8;
/// Starts of the API server: each takes seconds.
const RESTARTS_MAX: usize = 1;
/// How late the control plane may be: some answers come after nobody waits for them any more.
const DELAY_MS_MAX: u64 = 4000;
/// After the last fault a reconcile may wait for its turn, and a watch; and a control plane that was away is asked again after 30 s, as it is of what
/// tenants hold after a minute. An operator that paces its write-backs adds a minute to all of that.
const HEALS_WITHIN: Duration = Duration::from_secs(300);
/// What has not changed for so long does not: control planes that are away are looked at every 5 s.
const STABLE: Duration = Duration::from_secs(6);
/// The same while an operator may pace its write-backs to once a minute, which it does from the fifth of an object on.
const STABLE_WHEN_PACED: Duration = Duration::from_secs(65);
const PACED_FROM: f64 = 5.0;
/// Seconds for which nothing must be heard of sessions. More than an API server that starts anew keeps agents from telling.
const UNUSED: u64 = 10;

/// An operator, and what stands between it and the API server, and the control plane.
struct Replica {
    gate: Interposer,
    road: Relay,
    files: OperatorFiles,
    operator: Option<Operator>,
}

impl Replica {
    fn new(lab: &Lab, plane: &Plane, name: &str, namespace: &str) -> Replica {
        let road = Relay::to(plane.members.address());
        let gate = lab.world.interposer(&lab.server);
        let files = lab.world.operator(&lab.server, name, namespace).through(&gate);
        let files = files.control_plane(&format!("{SPACE}/c"), road.address()).unused_for(UNUSED);
        let mut replica = Replica { gate, road, files, operator: None };
        replica.start_anew();
        replica
    }

    fn start_anew(&mut self) {
        self.kill();
        self.operator = Some(self.files.start().expect("the operator starts"));
    }

    fn kill(&mut self) {
        if let Some(operator) = self.operator.take() {
            operator.kill();
        }
    }

    /// As a kubelet does: one that has ended is started again.
    fn tend(&mut self) {
        if !self.operator.as_mut().is_some_and(Operator::is_alive) {
            self.start_anew();
        }
    }

    fn disturb(&self, seed: u64) {
        self.gate.disturb(Some((seed, FAULTS_PERCENT)));
    }

    /// The road to the control plane is late, or leads nowhere for a while.
    fn block(&self, road: Road) {
        match road {
            Road::Cut => self.road.cut(),
            Road::Late(delay) => self.road.delay(delay),
        }
    }

    /// Whether it may have put back an object so often that it paces itself.
    fn may_pace(&self) -> bool {
        let operator = self.operator.as_ref().expect("it is tended");
        operator.samples("reprise_operator_put_backs_total").values().any(|count| *count >= PACED_FROM)
    }

    fn unblock(&self) {
        self.road.mend();
        self.road.delay(Duration::ZERO);
    }
}

/// What becomes of the road to the control plane.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Road {
    Cut,
    Late(Duration),
}

/// Something that happens. Operators are 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    OperatorKilled(usize),
    ServerRestarted,
    FaultsEnd(usize),
    /// From now on requests of an operator get the faults of this seed.
    FaultsBegin(usize, u64),
    PlaneRestarted,
    RoadBlocked(usize, Road),
    RoadOpened(usize),
    /// People, engines and agents do what is drawn from this seed.
    PeopleAct(u64),
}

/// All events, each with the pause after it. Drawn before the first of them, and each with a seed of its own, so that none depends on what the one
/// before has met.
fn script(random: &mut StdRng) -> Vec<(Event, Duration)> {
    let mut restarts = 0;
    let mut events = Vec::with_capacity(EVENTS);
    for _ in 0..EVENTS {
        let operator = random.random_range(0..2);
        let event = match random.random_range(0..24) {
            0..3 => Event::OperatorKilled(operator),
            3 if restarts < RESTARTS_MAX => {
                restarts += 1;
                Event::ServerRestarted
            }
            4 => Event::FaultsEnd(operator),
            5..7 => Event::FaultsBegin(operator, random.random()),
            7 => Event::PlaneRestarted,
            8 if random.random_bool(0.5) => Event::RoadBlocked(operator, Road::Cut),
            8 => {
                let delay = Duration::from_millis(random.random_range(0..DELAY_MS_MAX));
                Event::RoadBlocked(operator, Road::Late(delay))
            }
            9..11 => Event::RoadOpened(operator),
            _ => Event::PeopleAct(random.random()),
        };
        events.push((event, Duration::from_millis(random.random_range(0..PAUSE_MS_MAX))));
    }
    events
}

/// Says what a script has, which is the same for each run of its seed.
fn announce(events: &[(Event, Duration)]) {
    let count = |is: fn(&Event) -> bool| events.iter().filter(|(event, _)| is(event)).count();
    seed::say(&format!(
        "{NAME}: {} events, of them {} kills, {} restarts of the API server, {} of the control plane, {} roads to it blocked",
        events.len(),
        count(|event| matches!(event, Event::OperatorKilled(_))),
        count(|event| matches!(event, Event::ServerRestarted)),
        count(|event| matches!(event, Event::PlaneRestarted)),
        count(|event| matches!(event, Event::RoadBlocked(..))),
    ));
}

/// Makes all events happen, one after the other.
fn rage(lab: &mut Lab, people: &mut People, replicas: &mut [Replica; 2], events: &[(Event, Duration)]) {
    for (event, pause) in events {
        match *event {
            Event::OperatorKilled(operator) => replicas[operator].start_anew(),
            Event::ServerRestarted => {
                people.were_not_heard();
                lab.server.kill();
                lab.server.restart();
            }
            Event::FaultsEnd(operator) => replicas[operator].gate.disturb(None),
            Event::FaultsBegin(operator, seed) => replicas[operator].disturb(seed),
            Event::PlaneRestarted => people.plane.start_anew(),
            Event::RoadBlocked(operator, road) => replicas[operator].block(road),
            Event::RoadOpened(operator) => replicas[operator].unblock(),
            Event::PeopleAct(seed) => people.act(lab, &mut StdRng::seed_from_u64(seed)),
        }
        people.look(lab);
        replicas.iter_mut().for_each(Replica::tend);
        std::thread::sleep(*pause);
    }
    let faults: u64 = replicas.iter().map(|replica| replica.gate.faults()).sum();
    seed::say(&format!(
        "{NAME}: {faults} faults, {} deletions; looked {} times at what must wait",
        people.deleted, people.waited,
    ));
}

/// As the control plane is to be told it: nodes are what is wanted of them, and tenants may have what their specs say.
fn to_be_told(lab: &Lab) -> Value {
    let nodes = lab.list("CacheNode");
    let mode = |node: &DynamicObject| {
        let mode = node.data["spec"]["mode"].as_str().unwrap_or_default().to_lowercase();
        (node.name_any(), mode)
    };
    let modes: BTreeMap<String, String> = nodes.iter().map(mode).collect();
    let limit = |tenant: &DynamicObject| {
        let is_limited = !tenant.data["spec"]["budget"]["ssd"]["limit"].is_null();
        is_limited.then(|| (tenant.name_any(), LIMIT_BYTES))
    };
    let limits: BTreeMap<String, u64> = lab.list("CacheTenant").iter().filter_map(limit).collect();
    json!({ "modes": modes, "limits": limits })
}

/// As it was told it. Nobody who is not in the cluster has to be active.
fn told(lab: &Lab, plane: &Plane) -> Value {
    let is_in = |node: &String| lab.get("CacheNode", node).is_some();
    let modes: BTreeMap<String, String> = plane.modes().into_iter().filter(|(node, _)| is_in(node)).collect();
    let limits: BTreeMap<String, Value> =
        plane.budgets().into_iter().map(|(name, budget)| (name, budget["limit"]["nvme"].clone())).collect();
    json!({ "modes": modes, "limits": limits })
}

/// Waits until nothing changes any more; what there is then, and what is said of it.
fn stable(lab: &Lab, people: &mut People, stays: Duration) -> Outcome {
    let come_to = |plane: &Plane| {
        let told = told(lab, plane);
        let is_told = told == to_be_told(lab);
        let outcome = outcome(lab).with("the control plane", told);
        let is_over = is_told && outcome.is_current() && !outcome.says("ControlPlaneUnreachable");
        (outcome, is_over)
    };
    let (mut last, mut since) = (come_to(&people.plane).0, Instant::now());
    let (mut changes, give_up) = (0, Instant::now() + HEALS_WITHIN);
    while since.elapsed() < stays {
        if Instant::now() >= give_up {
            seed::say(&format!(
                "the last outcome: {last:#?}\nthe control plane should have: {:#}",
                to_be_told(lab)
            ));
            panic!(
                "no stable outcome within {HEALS_WITHIN:?}: {changes} changes, {}",
                if come_to(&people.plane).1 { "all as wanted" } else { "not all as wanted" }
            );
        }
        std::thread::sleep(Duration::from_millis(100));
        people.attend(lab);
        let (now, is_over) = come_to(&people.plane);
        if now != last || !is_over {
            changes += u64::from(now != last);
            (last, since) = (now, Instant::now());
        }
    }
    last
}

/// The same, after everything was looked at again: what waits after a failure, and what is looked at in its own time, since nothing tells of it.
fn come_to_rest(lab: &Lab, people: &mut People, stays: Duration) -> Outcome {
    stable(lab, people, stays);
    // The same again would be no change.
    let now = Timestamp::now().to_string();
    for key in lab.theirs().keys().map(String::as_str).chain(["Node/n1", "Node/n2"]) {
        mark(lab, key, &now);
    }
    stable(lab, people, stays)
}

#[test]
fn a_seed_decides_the_events() {
    let of = |seed: u64| script(&mut StdRng::seed_from_u64(seed));
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
    assert_eq!(of(1).len(), EVENTS);
}

#[test]
fn whatever_happens_they_end_in_what_a_fresh_one_makes_and_write_nothing_more() {
    let mut lab = Lab::new();
    let mut random = seed::seeded(NAME);
    for words in [
        "a reconcile failed and is tried again",
        "a watch was lost and begins again",
        "what belongs to no cluster could not be removed",
        "not all of a cluster that goes is as it is wanted",
        "the lease cannot be",
        "the lease could not be renewed",
        "another replica holds the lease",
        "the lease is lost",
        TOO_SHORT,
    ] {
        lab.world.allow(words);
    }
    lab.serve_pod_monitors();
    // Claims of devices that others have may be made.
    let labels = json!({ "resource.kubernetes.io/admin-access": "true" });
    lab.apply(
        &json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": SPACE, "labels": labels } }),
    );
    let mut people = People::new(Plane::new(&lab, &["n1", "n2"]));
    people.make_all(&lab, &mut StdRng::seed_from_u64(random.random()));
    people.connect("n1", 2);
    // With a lease of its own, so that both work at once.
    let mut replicas = [
        Replica::new(&lab, &people.plane, "first", SYSTEM),
        Replica::new(&lab, &people.plane, "second", SPACE),
    ];
    for replica in &replicas {
        replica.disturb(random.random());
    }
    let events = script(&mut random);
    announce(&events);
    rage(&mut lab, &mut people, &mut replicas, &events);

    for replica in &mut replicas {
        replica.gate.disturb(None);
        replica.unblock();
        replica.tend();
    }
    people.let_go(&lab);
    people.make_all(&lab, &mut StdRng::seed_from_u64(random.random()));
    people.agree(&lab);
    let stays = if replicas.iter().any(Replica::may_pace) { STABLE_WHEN_PACED } else { STABLE };
    let mut after_faults = come_to_rest(&lab, &mut people, stays);
    while people.renew_allocations(&lab, &mut random) {
        after_faults = come_to_rest(&lab, &mut people, stays);
    }
    seed::say(&format!("{NAME}: {} budgets that had come too late were removed by hand", people.removed));
    for replica in &mut replicas {
        replica.kill();
    }

    clear(&lab);
    people.plane.clear();
    // The lease of the killed one has to run out first.
    let leases: Api<Lease> = Api::namespaced(lab.client(), SYSTEM);
    lab.server.block_on(leases.delete("reprise-operator", &DeleteParams::default())).expect("it was held");
    let files = lab.operator_with("operator", people.plane.members.address()).unused_for(UNUSED);
    let fresh = files.start().unwrap_or_else(|refused| panic!("the operator does not start: {refused:?}"));
    lab.wait_for("CacheNode", "n1");
    let anew = come_to_rest(&lab, &mut people, STABLE);
    assert_same(&after_faults, &anew);
    assert_writes_nothing(&lab, &fresh);
    fresh.kill();
}
