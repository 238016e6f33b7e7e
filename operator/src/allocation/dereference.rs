//! Reads the allocations of a node, and what they refer to: the node's controllers and GPUs, pools, tenants, profiles.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use kube::api::{Api, ListParams};
use kube::runtime::reflector::ObjectRef;
use reprise_crds::node::{AppliedQueues, Controller};
use reprise_crds::status::{ConditionStatus, ConditionType, Reason, find};
use reprise_crds::{CacheNode, CacheNodeStatus, CacheTenant, GPUQueueAllocation, SSDPool, SlackProfile};

use super::grant::{Lender, budget};
use crate::context::Context;
use crate::error::OperatorError;
use crate::node::dereference::cluster_of;
use crate::plan::PoolPlan;

/// A node, and everything that its grants are decided by.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its name.
    pub node: String,
    /// Whether there is such a node, and somebody there.
    pub presence: Presence,
    /// What its agent says, where a cluster has the node.
    pub cache_node: Option<Arc<CacheNode>>,
    /// Its controllers, as far as pools have them.
    pub lenders: Vec<Lender>,
    /// All its allocations, by namespace and name.
    pub allocations: Vec<Referring>,
    /// Unique ids of those that this process has given the finalizer, for a grant that it has not tried to write since.
    pub held: BTreeSet<String>,
    /// Unique ids of those that were refused their finalizer in this turn ([`super::turn`]).
    pub passed_over: BTreeSet<String>,
}

/// Whether a node is there, and an agent on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// A cluster has it.
    Here,
    /// The cluster that had it has it no more. Its `CacheNode` is that one's until its agent has let go of what it keeps.
    Left,
    /// There is no such node, or not any more, and nothing of it that could be lent. Its agent may run as long as the machine does.
    Gone,
}

/// What the node's agent has of an allocation, or may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It says so.
    Told {
        /// Queue pairs that it keeps for it.
        kept: u32,
        /// Queue pairs that it has made.
        made: u32,
        /// Why it keeps none.
        refused: Option<String>,
    },
    /// It is told to keep some, or may not have seen yet that it is told so no more.
    Unanswered,
}

/// An allocation, and what it refers to.
#[derive(Clone, Debug)]
pub struct Referring {
    /// It.
    pub object: Arc<GPUQueueAllocation>,
    /// Its pool.
    pub pool: Option<Arc<SSDPool>>,
    /// What was decided of the pool.
    pub plan: PoolPlan,
    /// The tenant that it names.
    pub tenant: Option<Arc<CacheTenant>>,
    /// The profile that it names.
    pub profile: Option<Arc<SlackProfile>>,
}

/// What is known of a node, from the stores.
pub fn known(node: &str, context: &Context) -> Found {
    let world = &context.world;
    let allocations = world.allocations.state_filter(|one| one.spec.node_name.as_str() == node);
    // Whether this process has held them makes another step of it, not none.
    found(node, allocations, world.cache_nodes.get(&ObjectRef::new(node)), context)
}

/// The same with what the API server has now of allocations and of what the agent says: also grants that no watch has told of yet.
///
/// The `CacheNode` may be written at the same time by what a watch told a moment before, so an agent may be told of a grant that has ended: [`super`] says
/// what comes of that.
///
/// # Errors
/// It did not answer.
pub async fn asked(node: &str, context: &Context) -> Result<Found, OperatorError> {
    let allocations: Api<GPUQueueAllocation> = Api::all(context.client.clone());
    let of_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let listed = allocations.list(&of_node).await;
    let listed = listed.map_err(OperatorError::api(format!("list the allocations of node {node}")))?;
    let nodes: Api<CacheNode> = Api::all(context.client.clone());
    let cache_node = nodes.get_opt(node).await;
    let cache_node = cache_node.map_err(OperatorError::api(format!("look at CacheNode {node}")))?;
    let allocations = listed.items.into_iter().map(Arc::new).collect();
    Ok(found(node, allocations, cache_node.map(Arc::new), context))
}

fn found(
    node: &str,
    allocations: Vec<Arc<GPUQueueAllocation>>,
    cache_node: Option<Arc<CacheNode>>,
    context: &Context,
) -> Found {
    let mut allocations: Vec<Referring> =
        allocations.into_iter().map(|object| referring(object, context)).collect();
    allocations.sort_by_cached_key(|of| of.name());
    Found {
        node: node.to_owned(),
        presence: presence(node, cache_node.as_deref(), context),
        lenders: lenders(cache_node.as_deref(), context),
        cache_node,
        allocations,
        held: BTreeSet::new(),
        passed_over: BTreeSet::new(),
    }
}

fn presence(node: &str, cache_node: Option<&CacheNode>, context: &Context) -> Presence {
    let world = &context.world;
    if world.nodes.get(&ObjectRef::new(node)).is_none() {
        return Presence::Gone;
    }
    let before = cache_node.and_then(cluster_of);
    match world.plan().nodes.get(node).and_then(|plan| plan.cluster.as_ref()) {
        Some(cluster) if before.is_none_or(|before| before == *cluster) => Presence::Here,
        Some(_) | None => Presence::Left,
    }
}

fn referring(object: Arc<GPUQueueAllocation>, context: &Context) -> Referring {
    let (world, spec) = (&context.world, &object.spec);
    let namespace = object.namespace().unwrap_or_default();
    let pool = spec.pool_ref.name.as_str();
    let tenant = spec.tenant_ref.as_ref();
    let profile = spec.slack_profile_ref.as_ref();
    Referring {
        pool: world.pools.get(&ObjectRef::new(pool)),
        plan: world.plan().pools.get(pool).cloned().unwrap_or_default(),
        tenant: tenant.and_then(|tenant| world.tenants.get(&ObjectRef::new(tenant.name.as_str()))),
        profile: profile.and_then(|profile| {
            world.profiles.get(&ObjectRef::new(profile.name.as_str()).within(&namespace))
        }),
        object,
    }
}

/// What may be lent of the node's controllers. One whose pool is not there, or is no pool of raw devices, lends nothing.
fn lenders(cache_node: Option<&CacheNode>, context: &Context) -> Vec<Lender> {
    let lender = |controller: &Controller| {
        let name = controller.pool.as_ref()?;
        let pool = context.world.pools.get(&ObjectRef::new(name.as_str()))?;
        let percent = pool.spec.devices.as_ref()?.max_gpu_queue_percent;
        Some(Lender {
            serial: controller.serial.to_string(),
            pool: name.to_string(),
            budget: budget(controller.queue_pairs, percent),
        })
    };
    let status = cache_node.and_then(|node| node.status.as_ref());
    status.into_iter().flat_map(|status| &status.controllers).filter_map(lender).collect()
}

impl Referring {
    /// `namespace/name`.
    pub fn name(&self) -> String {
        name(&self.object)
    }
}

/// `namespace/name`.
pub fn name(object: &GPUQueueAllocation) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

impl Found {
    /// What the node's agent says, if it has ever said anything.
    pub fn status(&self) -> Option<&CacheNodeStatus> {
        self.cache_node.as_ref().and_then(|node| node.status.as_ref())
    }

    /// Whether this process has given an allocation its finalizer, for a grant that it has not tried to write since.
    pub fn is_held(&self, allocation: &GPUQueueAllocation) -> bool {
        allocation.metadata.uid.as_ref().is_some_and(|uid| self.held.contains(uid))
    }

    /// Whether an allocation was refused its finalizer in this turn.
    pub fn is_passed_over(&self, allocation: &GPUQueueAllocation) -> bool {
        allocation.metadata.uid.as_ref().is_some_and(|uid| self.passed_over.contains(uid))
    }

    /// What the agent has of an allocation, or may have; nothing when there is no node. It has nothing of what it is not told to keep once it has said
    /// so of that spec, or that it leaves. An agent keeps nothing before it has said something of
    /// this `CacheNode`, but for what it had by another one: who removes a `CacheNode` answers for that.
    pub fn kept(&self, allocation: &GPUQueueAllocation) -> Option<Kept> {
        let node = self.cache_node.as_deref().filter(|_| self.presence != Presence::Gone)?;
        let uid = allocation.metadata.uid.as_deref()?;
        let applied = node.status.as_ref().and_then(|status| status.applied.as_ref());
        let mut listed = applied.into_iter().flat_map(|applied| &applied.queues);
        if let Some(queues) = listed.find(|queues: &&AppliedQueues| queues.uid.as_str() == uid) {
            let refused = queues.refused.as_ref().map(ToString::to_string);
            return Some(Kept::Told { kept: queues.kept, made: queues.queue_pairs, refused });
        }
        let is_told = node.spec.queues.iter().any(|claim| claim.uid.as_str() == uid);
        (is_told || !has_answered(node)).then_some(Kept::Unanswered)
    }
}

/// Whether what the agent says is about the spec as it is, or the last that it says.
fn has_answered(node: &CacheNode) -> bool {
    let Some(status) = node.status.as_ref().filter(|status| status.last_updated.is_some()) else {
        return true;
    };
    let ready = find(&status.conditions, ConditionType::AgentReady);
    let has_left = ready.is_some_and(|ready| {
        ready.status == ConditionStatus::False && ready.reason == Reason::AgentGone.as_str()
    });
    has_left || status.observed_generation >= node.metadata.generation.unwrap_or_default()
}
