//! Decides and writes the changes to one node's allocations, one task per node at a time.
//!
//! A decision uses the objects that the API server returns at its start. Each write carries the object's
//! `resourceVersion`, so the API server rejects it with a conflict if the object has changed; the next
//! reconcile decides again. Failed writes are reported, and the remaining writes continue as far as
//! [`WriteQueue`] allows.
//!
//! A `resourceVersion` protects one object, but a controller's pairs are shared by several. Two rules prevent
//! a former leader, and an unanswered write of this process, from granting pairs that were since granted
//! elsewhere:
//! * A grant is written only after a check that this process still holds the lease, and the check comes after
//!   the listing. A former leader's grant in flight is therefore based on a listing made before the new
//!   leader acquired the lease.
//! * A grant needs the finalizer. For each object that has the finalizer but no grant, this process first
//!   writes a status, or removes the finalizer (and adds it again if it grants). That write changes the
//!   `resourceVersion`, so a former leader's grant in flight fails with a conflict. If the former leader's
//!   grant arrives first, our write fails instead and this decision grants nothing. A finalizer that this
//!   process added is valid for one attempt to grant; after an unanswered attempt it is renewed.
//!
//! The rules need no clocks: a process may pause between any two lines. They require an API server with
//! consistent reads that enforces `resourceVersion`, unique identities of replicas, and equal rights of all
//! replicas on all objects.
//!
//! A former leader can still end a grant of an unchanged object by an outdated decision. The pairs are then
//! unused, but never granted twice.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use reprise_crds::{GPUQueueAllocation, OPERATOR_FIELD_MANAGER};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::build::{Operation, PendingWrite};
use super::dereference::{GrantInputs, from_api_server};
use super::failed_writes::WriteFailure;
use super::status::StatusUpdate;
use super::write_queue::WriteQueue;
use crate::framework::clock;
use crate::framework::error::OperatorError;
use crate::framework::finalizers::{Finalizer, set};
use crate::framework::metrics::Write;
use crate::framework::status::publish_event;
use crate::reconcile::context::Context;
use crate::reconcile::names::QUEUES_FINALIZER;

/// HTTP status codes. With `UNCERTAIN` and above, the write may have taken effect although the request
/// failed.
const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;
const UNCERTAIN: u16 = 500;

/// Number of locks, and thus of nodes that are decided concurrently.
const CONCURRENT_NODES_MAX: usize = 16;

/// By node: uids of allocations to which this process added the finalizer, and whose grant it has not tried
/// to write since.
type FreshFinalizers = BTreeMap<String, BTreeSet<String>>;

/// Locks that serialize writes per node. Nodes whose hashes collide share a lock.
#[derive(Debug, Default)]
pub struct NodeLocks([Mutex<FreshFinalizers>; CONCURRENT_NODES_MAX]);

/// An allocation whose update failed.
#[derive(Debug)]
pub struct WriteError {
    /// The allocation as it was read.
    pub object: Arc<GPUQueueAllocation>,
    /// The error of the request.
    pub error: OperatorError,
}

impl NodeLocks {
    fn of(&self, node: &str) -> &Mutex<FreshFinalizers> {
        let mut hasher = DefaultHasher::new();
        node.hash(&mut hasher);
        let index = hasher.finish() as usize % CONCURRENT_NODES_MAX;
        &self.0[index]
    }
}

/// Brings all allocations of a node to their desired state. Returns the allocations whose writes the API
/// server rejected.
///
/// # Errors
/// Fails if the API server did not answer or another replica holds the lease. The remaining writes are then
/// skipped.
pub async fn reconcile_node(node: &str, context: &Context) -> Result<Vec<WriteError>, OperatorError> {
    let mut node_finalizers = context.node_locks.of(node).lock().await;
    let mut inputs = from_api_server(node, context).await?;
    let fresh = node_finalizers.entry(node.to_owned()).or_default();
    retain_ungranted(fresh, &inputs);
    inputs.fresh_finalizers.clone_from(fresh);
    let (mut writes, mut unwritten) = (WriteQueue::new(inputs, clock::now()), Vec::new());
    while let Some(step) = writes.next_write() {
        let Err(error) = execute(&step, fresh, context).await else { continue };
        // Without a response, the write may still arrive later: write nothing more.
        let Some(code) = error.code() else { return Err(error) };
        let is_outdated = code == CONFLICT || code >= UNCERTAIN;
        writes
            .record_failure(&step, if is_outdated { WriteFailure::Conflict } else { WriteFailure::Rejected });
        unwritten.push(WriteError { object: step.object, error });
    }
    if fresh.is_empty() {
        node_finalizers.remove(node);
    }
    Ok(unwritten)
}

/// Drops allocations that have a grant by now or are gone.
fn retain_ungranted(fresh: &mut BTreeSet<String>, inputs: &GrantInputs) {
    let waits = |uid: &String| {
        let mut all = inputs.allocations.iter().map(|of| &of.object);
        let it = all.find(|object| object.metadata.uid.as_ref() == Some(uid));
        it.is_some_and(|it| it.status.as_ref().is_none_or(|status| status.allocations.is_empty()))
    };
    fresh.retain(waits);
}

async fn execute(
    step: &PendingWrite,
    fresh: &mut BTreeSet<String>,
    context: &Context,
) -> Result<(), OperatorError> {
    let object = &*step.object;
    let namespace = object.namespace().unwrap_or_default();
    let api: Api<GPUQueueAllocation> = Api::namespaced(context.client.clone(), &namespace);
    let uid = object.uid().unwrap_or_default();
    match &step.operation {
        Operation::AddFinalizer => {
            set(context, object, &api, QUEUES_FINALIZER, Finalizer::Present).await?;
            fresh.insert(uid);
            Ok(())
        }
        Operation::RemoveFinalizer => {
            fresh.remove(&uid);
            set(context, object, &api, QUEUES_FINALIZER, Finalizer::Absent).await.map(drop)
        }
        Operation::EndGrant(update) | Operation::UpdateStatus(update) => {
            write(object, &api, update, context).await
        }
        Operation::Grant(update) => {
            // The attempt counts even if the API server does not answer.
            fresh.remove(&uid);
            if !context.lease.is_held().await? {
                return Err(OperatorError::LeaseLost);
            }
            write(object, &api, update, context).await
        }
    }
}

/// Writes a status. Fields of other writers cannot be lost: a concurrent change fails on the
/// `resourceVersion`.
async fn write(
    object: &GPUQueueAllocation,
    api: &Api<GPUQueueAllocation>,
    update: &StatusUpdate,
    context: &Context,
) -> Result<(), OperatorError> {
    let (name, status) = (object.name_any(), &update.status);
    let grants = if status.allocations.is_empty() { Value::Null } else { json!(status.allocations) };
    let body = json!({
        "metadata": { "resourceVersion": object.resource_version() },
        "status": {
            "observedGeneration": status.observed_generation,
            "allocations": grants,
            "queues": status.queues,
            "expiresAt": status.expires_at,
            "conditions": status.conditions,
        },
    });
    let params =
        PatchParams { field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    context.own_writes.record(object.metadata.uid.as_ref(), &Some(status));
    match api.patch_status(&name, &params, &Patch::Merge(&body)).await {
        Ok(_) => {}
        // The allocation was deleted concurrently, and its grant with it.
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(()),
        Err(error) => {
            return Err(OperatorError::api(format!("write the status of GPUQueueAllocation {name}"))(error));
        }
    }
    context.metrics.record_write("GPUQueueAllocation", Write::Status);
    for finding in &update.changes {
        publish_event(context, object, finding).await;
    }
    Ok(())
}
