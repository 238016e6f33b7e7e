//! Two active operators with random edits, deletions and faults converge to the state of a fresh operator.
//!
//! [`UserSimulator`] creates, changes and deletes objects of all user kinds. The final specs are random as
//! well. The comparison covers the operators' objects, all conditions and finalizers, and the modes and
//! budgets at the control plane.
//!
//! Faults of requests: answers 409 and 504, and connections cut before or after execution. Faults of
//! processes: restarts of the API server, kills of operators, and a control plane that is killed, unreachable
//! or slow. An operator that loses its lease exits and is started again, as a kubelet would do.
//!
//! The seed determines all events, their order, and the faults of requests ([`script`]). It does not
//! determine the progress of the operators at an event, so two runs of a seed differ.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, DynamicObject};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reprise_e2e::{FaultProxy, Operator, OperatorFiles, Relay, seed};
use serde_json::{Value, json};

use crate::operator::convergence::{annotate, assert_writes_nothing};
use crate::operator::deletion_guard::TOO_SHORT;
use crate::operator::snapshot::{ClusterSnapshot, assert_same, delete_operator_objects, snapshot};
use crate::operator::test_cluster::{NAMESPACE, OPERATOR_NAMESPACE, TestCluster};
use crate::operator::test_control_plane::TestControlPlane;
use crate::operator::user_simulator::{LIMIT_BYTES, UserSimulator};

const NAME: &str = "faulted_operators_converge_to_state_of_fresh_operator";
/// Number of random events.
const EVENTS: usize = 80;
/// Maximum pause between two events. Random pauses vary the operators' progress at an event.
const PAUSE_MS_MAX: u64 = 100;
/// Percentage of requests that get a fault while faults are enabled.
const FAULTS_PERCENT: u32 = 8;
/// Maximum number of API-server restarts, each of which takes seconds.
const RESTARTS_MAX: usize = 1;
/// Maximum delay of the control plane. Some answers arrive after the operator's timeout.
const DELAY_MS_MAX: u64 = 4000;
/// Upper bound for convergence after the last fault.
///
/// It covers retry delays of reconciles and watches, 30 s until an unreachable control plane is polled again,
/// one minute between polls of tenants' usage, and one minute for limited write-backs.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(300);
/// Time without a change after which the state is final. Unreachable control planes are polled every 5 s.
const STABLE_FOR: Duration = Duration::from_secs(6);
/// The same bound while write-backs may be limited to one a minute, which starts at the fifth of an object.
const STABLE_FOR_WHEN_PACED: Duration = Duration::from_secs(65);
const PACED_FROM_COUNT: f64 = 5.0;
/// Seconds without a session report after which an object counts as unused: more than an API-server
/// restart takes.
const UNUSED_SECONDS: u64 = 10;

/// An operator with its proxies to the API server and to the control plane.
struct Replica {
    proxy: FaultProxy,
    relay: Relay,
    files: OperatorFiles,
    operator: Option<Operator>,
}

impl Replica {
    fn new(k8s: &TestCluster, control_plane: &TestControlPlane, name: &str, namespace: &str) -> Replica {
        let relay = Relay::to(control_plane.members.address());
        let proxy = k8s.env.fault_proxy(&k8s.server);
        let files = k8s.env.operator(&k8s.server, name, namespace).via_proxy(&proxy);
        let files =
            files.control_plane(&format!("{NAMESPACE}/c"), relay.address()).unused_for(UNUSED_SECONDS);
        let mut replica = Replica { proxy, relay, files, operator: None };
        replica.restart();
        replica
    }

    fn restart(&mut self) {
        self.kill();
        self.operator = Some(self.files.start().expect("the operator starts"));
    }

    fn kill(&mut self) {
        if let Some(operator) = self.operator.take() {
            operator.kill();
        }
    }

    /// Starts the operator again if it has exited, as a kubelet does.
    fn restart_if_ended(&mut self) {
        if !self.operator.as_mut().is_some_and(Operator::is_alive) {
            self.restart();
        }
    }

    fn set_random_faults(&self, seed: u64) {
        self.proxy.set_random_faults(Some((seed, FAULTS_PERCENT)));
    }

    /// Cuts or delays the connection to the control plane.
    fn block(&self, fault: LinkFault) {
        match fault {
            LinkFault::Cut => self.relay.cut(),
            LinkFault::Delayed(delay) => self.relay.delay(delay),
        }
    }

    /// Whether the operator may limit its write-backs of some object.
    fn may_be_paced(&self) -> bool {
        let operator = self.operator.as_ref().expect("the operator runs");
        operator.samples("reprise_operator_put_backs_total").values().any(|count| *count >= PACED_FROM_COUNT)
    }

    fn unblock(&self) {
        self.relay.heal();
        self.relay.delay(Duration::ZERO);
    }
}

/// Fault of the connection to the control plane.
#[derive(Clone, Copy, Debug, PartialEq)]
enum LinkFault {
    Cut,
    Delayed(Duration),
}

/// Random event. Operators have the indexes 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    OperatorKilled(usize),
    ApiServerRestarted,
    FaultsStopped(usize),
    /// Requests of an operator get the faults of this seed from now on.
    FaultsStarted(usize, u64),
    ControlPlaneRestarted,
    LinkBlocked(usize, LinkFault),
    LinkRestored(usize),
    /// Users, engines and agents perform the action of this seed.
    UserAction(u64),
}

/// Returns all events, each with the pause after it.
///
/// All events are drawn in advance and each has a separate seed, so that none depends on the effect of
/// another.
fn script(random: &mut StdRng) -> Vec<(Event, Duration)> {
    let mut restarts = 0;
    let mut events = Vec::with_capacity(EVENTS);
    for _ in 0..EVENTS {
        let operator = random.random_range(0..2);
        let event = match random.random_range(0..24) {
            0..3 => Event::OperatorKilled(operator),
            3 if restarts < RESTARTS_MAX => {
                restarts += 1;
                Event::ApiServerRestarted
            }
            4 => Event::FaultsStopped(operator),
            5..7 => Event::FaultsStarted(operator, random.random()),
            7 => Event::ControlPlaneRestarted,
            8 if random.random_bool(0.5) => Event::LinkBlocked(operator, LinkFault::Cut),
            8 => {
                let delay = Duration::from_millis(random.random_range(0..DELAY_MS_MAX));
                Event::LinkBlocked(operator, LinkFault::Delayed(delay))
            }
            9..11 => Event::LinkRestored(operator),
            _ => Event::UserAction(random.random()),
        };
        events.push((event, Duration::from_millis(random.random_range(0..PAUSE_MS_MAX))));
    }
    events
}

/// Prints a summary of the events, which is the same for each run of a seed.
fn print_summary(events: &[(Event, Duration)]) {
    let count = |is: fn(&Event) -> bool| events.iter().filter(|(event, _)| is(event)).count();
    seed::print_line(&format!(
        "{NAME}: {} events, of them {} kills, {} restarts of the API server, {} of the control plane, {} faults of its connections",
        events.len(),
        count(|event| matches!(event, Event::OperatorKilled(_))),
        count(|event| matches!(event, Event::ApiServerRestarted)),
        count(|event| matches!(event, Event::ControlPlaneRestarted)),
        count(|event| matches!(event, Event::LinkBlocked(..))),
    ));
}

/// Runs all events in order.
fn run_events(
    k8s: &mut TestCluster,
    users: &mut UserSimulator,
    replicas: &mut [Replica; 2],
    events: &[(Event, Duration)],
) {
    for (event, pause) in events {
        match *event {
            Event::OperatorKilled(operator) => replicas[operator].restart(),
            Event::ApiServerRestarted => {
                users.clear_blocked();
                k8s.server.kill();
                k8s.server.restart();
            }
            Event::FaultsStopped(operator) => replicas[operator].proxy.set_random_faults(None),
            Event::FaultsStarted(operator, seed) => replicas[operator].set_random_faults(seed),
            Event::ControlPlaneRestarted => users.control_plane.restart(),
            Event::LinkBlocked(operator, fault) => replicas[operator].block(fault),
            Event::LinkRestored(operator) => replicas[operator].unblock(),
            Event::UserAction(seed) => users.random_action(k8s, &mut StdRng::seed_from_u64(seed)),
        }
        users.check_blocked(k8s);
        replicas.iter_mut().for_each(Replica::restart_if_ended);
        std::thread::sleep(*pause);
    }
    let faults: u64 = replicas.iter().map(|replica| replica.proxy.faults()).sum();
    seed::print_line(&format!(
        "{NAME}: {faults} faults, {} deletions; {} checks of blocked objects",
        users.deletions, users.blocked_checks,
    ));
}

/// Expected state of the control plane: modes of CacheNodes and limits of CacheTenants.
fn expected_state(k8s: &TestCluster) -> Value {
    let nodes = k8s.list("CacheNode");
    let mode = |node: &DynamicObject| {
        let mode = node.data["spec"]["mode"].as_str().unwrap_or_default().to_lowercase();
        (node.name_any(), mode)
    };
    let modes: BTreeMap<String, String> = nodes.iter().map(mode).collect();
    let limit = |tenant: &DynamicObject| {
        let is_limited = !tenant.data["spec"]["budget"]["ssd"]["limit"].is_null();
        is_limited.then(|| (tenant.name_any(), LIMIT_BYTES))
    };
    let limits: BTreeMap<String, u64> = k8s.list("CacheTenant").iter().filter_map(limit).collect();
    json!({ "modes": modes, "limits": limits })
}

/// Actual state of the control plane, without the modes of nodes outside of the cluster.
fn actual_state(k8s: &TestCluster, control_plane: &TestControlPlane) -> Value {
    let is_in = |node: &String| k8s.get("CacheNode", node).is_some();
    let modes: BTreeMap<String, String> =
        control_plane.modes().into_iter().filter(|(node, _)| is_in(node)).collect();
    let limits: BTreeMap<String, Value> = control_plane
        .budgets()
        .into_iter()
        .map(|(name, budget)| (name, budget["limit"]["nvme"].clone()))
        .collect();
    json!({ "modes": modes, "limits": limits })
}

/// Waits until the expected state has been stable for `stable_for`, and returns its snapshot.
fn wait_stable(k8s: &TestCluster, users: &mut UserSimulator, stable_for: Duration) -> ClusterSnapshot {
    let current_state = |control_plane: &TestControlPlane| {
        let actual = actual_state(k8s, control_plane);
        let is_applied = actual == expected_state(k8s);
        let snapshot = snapshot(k8s).with("the control plane", actual);
        let is_complete =
            is_applied && snapshot.is_current() && !snapshot.has_condition_reason("ControlPlaneUnreachable");
        (snapshot, is_complete)
    };
    let (mut last, mut since) = (current_state(&users.control_plane).0, Instant::now());
    let (mut changes, give_up) = (0, Instant::now() + RECOVERY_TIMEOUT);
    while since.elapsed() < stable_for {
        if Instant::now() >= give_up {
            seed::print_line(&format!(
                "last snapshot: {last:#?}\nexpected state of the control plane: {:#}",
                expected_state(k8s)
            ));
            panic!(
                "no stable state within {RECOVERY_TIMEOUT:?}: {changes} changes, {}",
                if current_state(&users.control_plane).1 { "complete" } else { "incomplete" }
            );
        }
        std::thread::sleep(Duration::from_millis(100));
        users.sync_agents(k8s);
        let (now, is_complete) = current_state(&users.control_plane);
        if now != last || !is_complete {
            changes += u64::from(now != last);
            (last, since) = (now, Instant::now());
        }
    }
    last
}

/// Waits for a stable state twice, with a reconcile of every object in between.
///
/// The reconcile covers objects in retry delay, and state that is polled because it has no watch.
fn wait_stable_after_resync(
    k8s: &TestCluster,
    users: &mut UserSimulator,
    stable_for: Duration,
) -> ClusterSnapshot {
    wait_stable(k8s, users, stable_for);
    // A constant annotation value would cause no event.
    let now = Timestamp::now().to_string();
    for key in k8s.user_objects().keys().map(String::as_str).chain(["Node/n1", "Node/n2"]) {
        annotate(k8s, key, &now);
    }
    wait_stable(k8s, users, stable_for)
}

#[test]
fn seed_determines_events() {
    let of = |seed: u64| script(&mut StdRng::seed_from_u64(seed));
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
    assert_eq!(of(1).len(), EVENTS);
}

#[test]
fn faulted_operators_converge_to_state_of_fresh_operator() {
    let mut k8s = TestCluster::new();
    let mut random = seed::seeded(NAME);
    for words in [
        "reconcile failed; retrying",
        "watch lost; restarting it",
        "cannot delete objects of deleted clusters; retrying",
        "lease request failed",
        "lease not renewed for",
        "another replica holds the lease",
        "lost the lease",
        TOO_SHORT,
    ] {
        k8s.env.allow(words);
    }
    k8s.serve_pod_monitors();
    // Allows claims with admin access, which share devices with other pods.
    let labels = json!({ "resource.kubernetes.io/admin-access": "true" });
    k8s.apply(
        &json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE, "labels": labels } }),
    );
    let mut users = UserSimulator::new(TestControlPlane::new(&k8s, &["n1", "n2"]));
    users.apply_all(&k8s, &mut StdRng::seed_from_u64(random.random()));
    users.set_sessions("n1", 2);
    // Leases in different namespaces, so that both operators are active.
    let mut replicas = [
        Replica::new(&k8s, &users.control_plane, "first", OPERATOR_NAMESPACE),
        Replica::new(&k8s, &users.control_plane, "second", NAMESPACE),
    ];
    for replica in &replicas {
        replica.set_random_faults(random.random());
    }
    let events = script(&mut random);
    print_summary(&events);
    run_events(&mut k8s, &mut users, &mut replicas, &events);

    for replica in &mut replicas {
        replica.proxy.set_random_faults(None);
        replica.unblock();
        replica.restart_if_ended();
    }
    users.release_all(&k8s);
    users.apply_all(&k8s, &mut StdRng::seed_from_u64(random.random()));
    let stable_for =
        if replicas.iter().any(Replica::may_be_paced) { STABLE_FOR_WHEN_PACED } else { STABLE_FOR };
    let mut after_faults = wait_stable_after_resync(&k8s, &mut users, stable_for);
    while users.recreate_ended_allocations(&k8s, &mut random) {
        after_faults = wait_stable_after_resync(&k8s, &mut users, stable_for);
    }
    seed::print_line(&format!(
        "{NAME}: {} budgets that arrived too late were removed manually",
        users.budgets_removed
    ));
    for replica in &mut replicas {
        replica.kill();
    }

    delete_operator_objects(&k8s);
    users.control_plane.clear();
    // Otherwise the new operator would wait until the lease of the killed one expires.
    let leases: Api<Lease> = Api::namespaced(k8s.client(), OPERATOR_NAMESPACE);
    k8s.server
        .block_on(leases.delete("reprise-operator", &DeleteParams::default()))
        .expect("the lease exists");
    let files =
        k8s.operator_with("operator", users.control_plane.members.address()).unused_for(UNUSED_SECONDS);
    let fresh = files.start().unwrap_or_else(|error| panic!("the operator does not start: {error:?}"));
    k8s.wait_for("CacheNode", "n1");
    let of_fresh_operator = wait_stable_after_resync(&k8s, &mut users, STABLE_FOR);
    assert_same(&after_faults, &of_fresh_operator);
    assert_writes_nothing(&k8s, &fresh);
    fresh.kill();
}
