//! Decides and writes the changes to one node's allocations, one pass per node at a time.
//!
//! A pass uses the objects that the API server returns at its start and with each write. Each write carries the
//! object's `resourceVersion`, so the API server rejects it with a conflict if the object has changed. Then, and
//! after a write that may still take effect, the pass ends. Other writes that the API server rejects affect only
//! one allocation ([`Pass`]).
//!
//! A `resourceVersion` protects one object, but a controller's pairs are shared by several. Two rules prevent
//! a former leader, and an unanswered write of this process, from granting pairs that were since granted
//! elsewhere:
//! * A grant is written only after a check that this process still holds the lease, and the check comes after the
//!   listing. A former leader's grant in flight is therefore based on a listing made before the new leader acquired
//!   the lease.
//! * A grant needs the finalizer. Each finalizer that this process has not added, of an object without a grant, is
//!   first removed (and added again if the object gets a grant). That write changes the `resourceVersion`, so a
//!   former leader's grant in flight fails with a conflict. If the former leader's grant arrives first, the write
//!   of this process fails instead, and the pass grants nothing. A finalizer that this process added is valid for
//!   one attempt to grant; after an unanswered attempt it is renewed.
//!
//! The rules need no clocks: a process may pause between any two lines. A reconcile that is dropped, after a timeout,
//! is like an unanswered write: the finalizers that it added then count as those of another process. The rules require
//! an API server with consistent reads that enforces `resourceVersion`, unique identities of replicas, and equal rights
//! of all replicas on all objects.
//!
//! A former leader can still end a grant of an unchanged object by an outdated decision. The pairs are then
//! unused, but never granted twice.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use reprise_crds::{GPUQueueAllocation, OPERATOR_FIELD_MANAGER};
use tokio::sync::Mutex;

use super::build::{Operation, Pass, PendingWrite};
use super::dereference::{GrantInputs, from_api_server};
use crate::framework::clock;
use crate::framework::error::{CONFLICT, OperatorError};
use crate::framework::metrics::Write;
use crate::framework::status::publish_event;
use crate::reconcile::context::Context;

/// HTTP status code from which on the write may have taken effect although the request failed.
const UNCERTAIN: u16 = 500;

/// Number of locks, and thus of nodes that are decided concurrently.
const CONCURRENT_NODES_MAX: usize = 16;

/// Locks that serialize passes per node. Nodes whose hashes collide share a lock. It contains the uids of allocations
/// to which this process added the finalizer, and whose grant it has not tried to write since.
#[derive(Debug, Default)]
pub struct NodeLocks([Mutex<BTreeSet<String>>; CONCURRENT_NODES_MAX]);

impl NodeLocks {
    fn of(&self, node: &str) -> &Mutex<BTreeSet<String>> {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(node);
        &self.0[hash as usize % CONCURRENT_NODES_MAX]
    }
}

/// Brings all allocations of the node of `own` to the desired state, and returns them.
///
/// # Errors
/// Fails if the API server rejected a write of `own`. It fails at once, and skips the remaining writes, if an object
/// has changed, the API server did not answer or another replica holds the lease.
pub async fn reconcile_node(
    own: &GPUQueueAllocation,
    context: &Context,
) -> Result<GrantInputs, OperatorError> {
    let node = own.spec.node_name.as_str();
    let mut fresh_finalizers = context.node_locks.of(node).lock().await;
    let inputs = from_api_server(node, context).await?;
    let mut pass = Pass::new(inputs, std::mem::take(&mut *fresh_finalizers), clock::now());
    let result = run(&mut pass, own, context).await;
    *fresh_finalizers = pass.fresh_finalizers;
    result.map(|()| pass.inputs)
}

async fn run(pass: &mut Pass, own: &GPUQueueAllocation, context: &Context) -> Result<(), OperatorError> {
    let mut result = Ok(());
    while let Some(write) = pass.next_write() {
        let error = match execute(&write, context).await {
            Ok(object) => {
                pass.record_success(&write, object);
                continue;
            }
            Err(error) => error,
        };
        pass.record_failure(&write);
        if error.code().is_none_or(|code| code == CONFLICT || code >= UNCERTAIN) {
            return Err(error);
        }
        if write.object.uid() == own.uid() {
            result = Err(error);
        } else {
            // The next reconcile of the node retries it, at the latest after the agent's next report.
            tracing::info!(%error, "cannot update another allocation of this node");
        }
    }
    result
}

/// Executes a write and returns the new object; `None` if the object was deleted concurrently, and its grant with it.
async fn execute(
    write: &PendingWrite,
    context: &Context,
) -> Result<Option<GPUQueueAllocation>, OperatorError> {
    if write.operation == Operation::Grant && !context.lease.is_held().await? {
        return Err(OperatorError::LeaseLost);
    }
    let object = &*write.object;
    let name = object.name_any();
    let api: Api<GPUQueueAllocation> =
        Api::namespaced(context.client.clone(), &object.namespace().unwrap_or_default());
    let patch = Patch::Merge(write.body());
    let (what, kind, written) = match &write.update {
        None => {
            let written = api.patch(&name, &PatchParams::default(), &patch).await;
            ("change finalizers", Write::Finalizers, written)
        }
        Some(update) => {
            let manager = Some(OPERATOR_FIELD_MANAGER.to_owned());
            let params = PatchParams { field_manager: manager, ..PatchParams::default() };
            context.own_writes.record(object, &update.status);
            ("write the status", Write::Status, api.patch_status(&name, &params, &patch).await)
        }
    };
    let result = match written {
        Ok(result) => result,
        Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(None),
        Err(error) => return Err(OperatorError::api(format!("{what} of GPUQueueAllocation {name}"))(error)),
    };
    context.metrics.record_write("GPUQueueAllocation", kind);
    for finding in write.update.iter().flat_map(|update| &update.changes) {
        publish_event(context, object, finding).await;
    }
    Ok(Some(result))
}
