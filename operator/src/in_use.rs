//! Deletion of what engines use: a cluster or pool whose agents have sessions waits until they have none, or until somebody has said that
//! it need not.
//!
//! An object that is being deleted takes no finalizer, so ours ([`IN_USE_FINALIZER`]) is there while a node has sessions, and for a time after:
//! it goes when nothing was heard of a session for [`crate::settings::Settings::unused_for`] without a break, by this process's own clock
//! ([`Rests`]), and the API server itself has nothing newer to say, since a watch may be stalled. An agent that restarts has none until its
//! engines are back, and one that cannot reach the API server says nothing; both have that time. So a node that says nothing for so long holds
//! nobody: its agent is away, and so is what it served; a deletion that goes on without it says so.
//!
//! A pool that is to be wiped has the finalizer from the beginning until its wipe is confirmed and it is deleted, and that time begins then: sessions
//! that began before are waited for, since their data would be destroyed. Of other objects a session that begins within a report of the
//! deletion (10 s) is not waited for; no data is lost by that.
//!
//! Deliberately absent: a deletion in the foreground, and one of the namespace, in which Kubernetes removes the children whatever finalizers the owner
//! has. The cluster stays as long as one of ours is on it, its pods do not.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use kube::api::{Api, ListParams};
use kube::{Resource, ResourceExt};
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::{CacheNode, KVCacheCluster, SSDPool};
use serde::de::DeserializeOwned;

pub use self::rests::Rests;
use self::rests::Said;
use crate::cluster::dereference::is_of;
use crate::context::Context;
use crate::error::OperatorError;
use crate::finalizers::{Attempt, Finalizer, Forbidden, try_set};
use crate::names::{ClusterNames, DELETE_IN_USE, IN_USE_FINALIZER};
use crate::status::tell;

mod rests;

/// What waits is looked at again so often: a node that falls silent tells nobody.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// And not sooner than this.
const LOOK_SOON: Duration = Duration::from_secs(1);

/// What the annotation [`DELETE_IN_USE`] says.
pub const YES: &str = "yes";

/// For whom a deletion waits.
pub const FOR_WHOM: &str = "engines that use the object";

/// Kubernetes' own finalizer of what is deleted after its children.
const FOREGROUND: &str = "foregroundDeletion";

/// So many nodes are named, at the most.
const NAMES_MAX: usize = 5;

/// Who uses an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Which nodes are asked.
    users: Users,
    /// What those have said that have sessions.
    said: Said,
    /// These, by name.
    used: Vec<NodeSessions>,
    /// It is held whether it is used or not.
    is_guarded: bool,
    /// Somebody has said that it does not matter.
    confirmed: bool,
    /// The object has our finalizer.
    is_held: bool,
    /// How long nothing more may be heard of sessions until it counts as unused.
    left: Duration,
    /// Of that, the whole.
    after: Duration,
}

/// Nodes whose engines use an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Users {
    /// None.
    #[default]
    Nobody,
    /// Those of a cluster.
    Cluster(ClusterNames),
    /// Those that have a pool of this unique id.
    Pool(String),
}

/// Sessions of a node, as it said last.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NodeSessions {
    node: String,
    sessions: u32,
}

/// What is so of an object after its finalizer was looked at.
#[derive(Debug)]
pub enum Kept {
    /// Its finalizer was changed; that is a change of the object, which is looked at again.
    Changed,
    /// It is being deleted, and waits.
    Held,
    /// It is not held.
    Free,
    /// Its finalizer is not as it should be, and the API server does not let us.
    Forbidden(Forbidden),
}

impl Users {
    fn has(&self, node: &CacheNode) -> bool {
        match self {
            Users::Nobody => false,
            Users::Cluster(names) => is_of(node, names),
            Users::Pool(uid) => node.spec.claims.iter().any(|claim| claim.uid.as_str() == uid),
        }
    }
}

/// What nodes with sessions have said.
fn said<'a>(nodes: impl Iterator<Item = &'a CacheNode>) -> Said {
    let of = |node: &CacheNode| {
        let status = node.status.as_ref()?;
        let sessions = status.sessions.filter(|sessions| *sessions > 0)?;
        let when = status.last_updated.as_ref().map(|when| when.0.to_string()).unwrap_or_default();
        Some((node.name_any(), sessions, when))
    };
    let mut said: Said = nodes.filter_map(of).collect();
    said.sort();
    said
}

impl Usage {
    /// Out of what its nodes say; `after`: when it counts as unused.
    fn of<K: Resource>(
        object: &K,
        said: Said,
        is_guarded: bool,
        (rests, after, now): (&Rests, Duration, Instant),
    ) -> Usage {
        let is_held = holds(object);
        // The end of the guard is news: who came lately may not have been told of yet.
        let seen = (said.clone(), is_guarded);
        let rested = rests.look(&object.uid().unwrap_or_default(), &seen, is_held, now);
        let of_node = |(node, sessions, _): &(String, u32, String)| NodeSessions {
            node: node.clone(),
            sessions: *sessions,
        };
        Usage {
            users: Users::Nobody,
            used: said.iter().map(of_node).collect(),
            said,
            is_guarded,
            confirmed: object.annotations().get(DELETE_IN_USE).is_some_and(|said| said == YES),
            is_held,
            left: after.saturating_sub(rested),
            after,
        }
    }

    /// Whether the object must not go yet.
    fn finalizer(&self) -> Finalizer {
        let holds = (self.is_guarded || self.counts()) && !self.confirmed;
        if holds { Finalizer::Wanted } else { Finalizer::Unwanted }
    }

    /// Whether it counts as used.
    fn counts(&self) -> bool {
        !self.left.is_zero() && (self.is_held || !self.used.is_empty())
    }

    /// How soon the object is to be looked at again, if nobody tells us before.
    pub fn look_again<K: Resource>(&self, object: &K) -> Option<Duration> {
        let goes = object.meta().deletion_timestamp.is_some();
        // What is used, and not to go, changes with what its agents say.
        let waits = self.is_held && self.counts() && !self.confirmed && (goes || self.used.is_empty());
        waits.then(|| self.left.clamp(LOOK_SOON, LOOK_AGAIN))
    }

    /// What its deletion waits for, if it does.
    pub fn blocked<K: Resource>(&self, object: &K) -> Option<Finding> {
        let waits = object.meta().deletion_timestamp.is_some() && self.is_held;
        // A guarded one that nobody uses waits for somebody's word.
        let is_said = self.is_guarded && (self.used.is_empty() || self.left.is_zero());
        if !waits || is_said || self.finalizer() == Finalizer::Unwanted {
            return None;
        }
        let annotation = format!("{DELETE_IN_USE}: \"{YES}\"");
        let after = self.after.as_secs();
        let message = if self.used.is_empty() {
            format!(
                "no engine is known to have a session any more. It goes when that has been so for {after} s, which an agent that restarts has to \
                 say otherwise; annotated with {annotation} it goes at once"
            )
        } else {
            format!(
                "engines have sessions on {}: stop them, or annotate the object with {annotation} to let it go with them under way. Nodes of \
                 which nothing is heard for {after} s are not waited for",
                named(&self.used)
            )
        };
        Some(Finding::yes(ConditionType::DeletionBlocked, Reason::InUse, message))
    }

    /// Why a deletion goes on that waited.
    fn let_go(&self) -> Finding {
        let kind = ConditionType::DeletionBlocked;
        if self.used.is_empty() {
            return Finding::no(kind, Reason::AsDesired, "no engine has a session any more");
        }
        let nodes = named(&self.used);
        if self.confirmed {
            let message = format!("{DELETE_IN_USE} is {YES}: it goes with sessions on {nodes}");
            return Finding::no(kind, Reason::InUse, message);
        }
        let message = format!(
            "no engine is known to have a session any more; not waited for, since nothing was heard of their agents for {} s: {nodes}",
            self.after.as_secs()
        );
        Finding::no(kind, Reason::AgentGone, message)
    }
}

fn named(nodes: &[NodeSessions]) -> String {
    let one = |node: &NodeSessions| format!("{} ({})", node.node, node.sessions);
    let names = nodes.iter().take(NAMES_MAX).map(one).collect::<Vec<_>>().join(", ");
    match nodes.len().saturating_sub(NAMES_MAX) {
        0 => names,
        more => format!("{names} and {more} more nodes"),
    }
}

/// Whether an object has our finalizer.
pub fn holds<K: Resource>(object: &K) -> bool {
    has(object, IN_USE_FINALIZER)
}

fn has<K: Resource>(object: &K, finalizer: &str) -> bool {
    object.finalizers().iter().any(|one| one == finalizer)
}

/// Whether an object goes, and nothing of ours holds it for those who use it: until then it works as before.
pub fn goes<K: Resource>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_some() && !holds(object)
}

/// Whether what is an object's is kept as it is wanted. Of one that is deleted after its children Kubernetes removes these.
pub fn is_kept<K: Resource>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_none() || (holds(object) && !has(object, FOREGROUND))
}

/// Who uses a cluster.
pub fn of_cluster(cluster: &KVCacheCluster, context: &Context) -> Usage {
    look(cluster, Users::Cluster(ClusterNames::of(cluster)), false, context)
}

/// Who uses a pool: whoever has sessions on a node that has it. A guarded one is held whether it is used or not.
pub fn of_pool(pool: &SSDPool, is_guarded: bool, context: &Context) -> Usage {
    look(pool, Users::Pool(pool.uid().unwrap_or_default()), is_guarded, context)
}

fn look<K: Resource>(object: &K, users: Users, is_guarded: bool, context: &Context) -> Usage {
    let nodes = context.world.cache_nodes.state_filter(|node| users.has(node));
    let time = (&context.rests, context.settings.unused_for, Instant::now());
    let usage = Usage::of(object, said(nodes.iter().map(AsRef::as_ref)), is_guarded, time);
    Usage { users, ..usage }
}

/// Makes an object have our finalizer, or not have it. It stays, and counts as used anew, when the API server knows of sessions what nobody
/// has told us.
///
/// # Errors
/// The API server did not take it.
pub async fn keep<K>(
    context: &Context,
    object: &K,
    api: &Api<K>,
    usage: &mut Usage,
) -> Result<Kept, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let goes = object.meta().deletion_timestamp.is_some();
    let wanted = usage.finalizer();
    match (wanted, holds(object)) {
        (Finalizer::Wanted, true) if goes => return Ok(Kept::Held),
        // It came too late for one that is being deleted.
        (Finalizer::Wanted, false) if goes => return Ok(Kept::Free),
        (Finalizer::Wanted, true) | (Finalizer::Unwanted, false) => return Ok(Kept::Free),
        (Finalizer::Wanted, false) | (Finalizer::Unwanted, true) => {}
    }
    if wanted == Finalizer::Unwanted && !usage.confirmed && is_news(context, usage).await? {
        context.rests.begin_anew(&object.uid().unwrap_or_default());
        usage.left = usage.after;
        return Ok(if goes { Kept::Held } else { Kept::Free });
    }
    match try_set(context, object, api, IN_USE_FINALIZER, wanted).await? {
        Attempt::Done(_) => {
            if goes {
                tell(context, object, &usage.let_go()).await;
            }
            Ok(Kept::Changed)
        }
        Attempt::Forbidden(refused) => Ok(Kept::Forbidden(refused)),
    }
}

/// Whether the API server knows of other sessions than we.
async fn is_news(context: &Context, usage: &Usage) -> Result<bool, OperatorError> {
    let nodes: Api<CacheNode> = Api::all(context.client.clone());
    let listed = nodes.list(&ListParams::default()).await;
    let live = listed.map_err(OperatorError::api("look at CacheNodes before a deletion goes on"))?;
    Ok(said(live.iter().filter(|node| usage.users.has(node))) != usage.said)
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "metadata is made where it is passed")]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    fn pool(more: Value) -> SSDPool {
        let mut metadata = json!({ "name": "p", "uid": "u" });
        metadata.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        let whole = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": metadata,
            "spec": { "directory": { "path": "/p", "size": "1Gi" } },
        });
        serde_json::from_value(whole).expect("a pool")
    }

    fn node(name: &str, status: Value) -> Arc<CacheNode> {
        let node = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode",
            "metadata": { "name": name }, "spec": { "nodeName": name }, "status": status,
        });
        Arc::new(serde_json::from_value(node).expect("a CacheNode"))
    }

    fn now(sessions: u32) -> Value {
        json!({ "lastUpdated": crate::clock::now(), "sessions": sessions })
    }

    const AFTER: Duration = Duration::from_secs(60);

    fn look(object: &SSDPool, nodes: &[Arc<CacheNode>], rests: &Rests, now: Instant) -> Usage {
        Usage::of(object, said(nodes.iter().map(AsRef::as_ref)), false, (rests, AFTER, now))
    }

    /// At the first look.
    fn usage_of(object: &SSDPool, nodes: &[Arc<CacheNode>]) -> Usage {
        look(object, nodes, &Rests::default(), Instant::now())
    }

    /// When nothing has changed for long enough.
    fn rested(object: &SSDPool, nodes: &[Arc<CacheNode>]) -> Usage {
        let (rests, begun) = (Rests::default(), Instant::now());
        (0..=3).map(|time| look(object, nodes, &rests, begun + time * AFTER / 3)).last().expect("looks")
    }

    fn going() -> Value {
        json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [IN_USE_FINALIZER] })
    }

    #[test]
    fn sessions_hold_a_deletion_and_say_where_they_are_and_what_lets_it_go() {
        let nodes = [node("n2", now(3)), node("n1", now(1)), node("n3", now(0))];
        let usage = usage_of(&pool(json!({})), &nodes);
        assert_eq!(usage.finalizer(), Finalizer::Wanted);
        assert_eq!(usage.blocked(&pool(json!({}))), None, "nobody deletes it");
        let said = usage_of(&pool(going()), &nodes).blocked(&pool(going())).expect("it waits");
        assert_eq!((said.kind, said.reason), (ConditionType::DeletionBlocked, Reason::InUse));
        assert!(said.message.contains("n1 (1), n2 (3)"), "{}", said.message);
        assert!(said.message.contains("reprise.dev/delete-in-use: \"yes\""), "{}", said.message);
        let gone = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["reprise.dev/wipe"] });
        assert_eq!(
            usage_of(&pool(gone.clone()), &nodes).blocked(&pool(gone)),
            None,
            "something else holds it"
        );
    }

    #[test]
    fn who_has_said_yes_is_not_held_and_other_words_say_nothing() {
        let nodes = [node("n1", now(1))];
        let said = |word: &str| usage_of(&pool(json!({ "annotations": { DELETE_IN_USE: word } })), &nodes);
        assert_eq!(said("true").finalizer(), Finalizer::Wanted);
        assert_eq!(said(YES).finalizer(), Finalizer::Unwanted);
        assert!(said(YES).let_go().message.contains("n1 (1)"), "{:?}", said(YES).let_go());
    }

    #[test]
    fn what_was_used_is_held_until_nothing_was_heard_of_sessions_for_long_enough() {
        let (going, none) = (pool(going()), [node("n1", now(0))]);
        let first = usage_of(&going, &none);
        assert_eq!((first.finalizer(), first.look_again(&going)), (Finalizer::Wanted, Some(LOOK_AGAIN)));
        let said = first.blocked(&going).expect("it waits").message;
        assert!(said.contains("no engine is known") && said.contains("so for 60 s"), "{said}");
        let last = rested(&going, &none);
        assert_eq!((last.finalizer(), last.look_again(&going)), (Finalizer::Unwanted, None));
        assert_eq!((last.blocked(&going), last.let_go().reason), (None, Reason::AsDesired));
        // One that nobody ever used is not held for that.
        assert_eq!(usage_of(&pool(json!({})), &none).finalizer(), Finalizer::Unwanted);
        // Agents that do not tell, and those that have never said anything.
        for status in [json!({ "lastUpdated": crate::clock::now() }), json!(null)] {
            assert_eq!(usage_of(&pool(json!({})), &[node("n1", status)]).finalizer(), Finalizer::Unwanted);
        }
    }

    #[test]
    fn what_is_said_again_goes_on_whatever_the_clock_of_the_node_says() {
        let (rests, begun, going) = (Rests::default(), Instant::now(), pool(going()));
        for (time, year) in (0..9).zip(2001..) {
            let said = json!({ "lastUpdated": format!("{year}-01-01T00:00:00Z"), "sessions": 1 });
            let usage = look(&going, &[node("n1", said)], &rests, begun + time * AFTER / 3);
            assert_eq!(usage.finalizer(), Finalizer::Wanted, "look {time}");
        }
    }

    #[test]
    fn nodes_that_do_not_report_hold_nobody_for_long_and_are_named() {
        let old = json!({ "lastUpdated": "2026-01-01T00:00:00Z", "sessions": 2 });
        let nodes = [node("n1", old.clone())];
        assert_eq!(usage_of(&pool(going()), &nodes).finalizer(), Finalizer::Wanted);
        let usage = rested(&pool(going()), &nodes);
        assert_eq!(usage.finalizer(), Finalizer::Unwanted);
        let said = usage.let_go();
        assert_eq!(said.reason, Reason::AgentGone);
        assert!(said.message.contains("n1 (2)"), "{}", said.message);
    }

    #[test]
    fn what_is_guarded_is_held_by_itself_and_waits_for_a_word_and_not_for_nobody() {
        let (plain, goes) = (pool(json!({})), pool(going()));
        let guarded =
            |object: &SSDPool, nodes: &[Arc<CacheNode>]| Usage { is_guarded: true, ..rested(object, nodes) };
        assert_eq!(guarded(&plain, &[]).finalizer(), Finalizer::Wanted, "before anybody uses it");
        let unused = guarded(&goes, &[node("n1", now(0))]);
        assert_eq!((unused.finalizer(), unused.blocked(&goes)), (Finalizer::Wanted, None));
        assert_eq!(unused.look_again(&goes), None, "somebody's word is a change");
        let used = Usage { is_guarded: true, ..usage_of(&goes, &[node("n1", now(1))]) };
        assert!(used.blocked(&goes).expect("they would lose their data").message.contains("n1 (1)"));
        let mut said = going();
        said["annotations"] = json!({ DELETE_IN_USE: YES });
        assert_eq!(guarded(&pool(said), &[]).finalizer(), Finalizer::Unwanted);
    }

    #[test]
    fn what_waits_is_kept_as_before_unless_its_children_go_first() {
        let of = |more: Value| (is_kept(&pool(more.clone())), goes(&pool(more)));
        assert_eq!(of(json!({})), (true, false));
        assert_eq!(of(going()), (true, false));
        let gone = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" });
        assert_eq!(of(gone.clone()), (false, true));
        let mut foreground = gone;
        foreground["finalizers"] = json!([IN_USE_FINALIZER, FOREGROUND]);
        assert_eq!(of(foreground), (false, false));
    }

    #[test]
    fn of_many_nodes_a_few_are_named() {
        let nodes: Vec<Arc<CacheNode>> = (0..9).map(|index| node(&format!("n{index}"), now(1))).collect();
        let said = usage_of(&pool(going()), &nodes).blocked(&pool(going())).expect("it waits");
        assert!(said.message.contains("n4 (1) and 4 more nodes"), "{}", said.message);
    }
}
