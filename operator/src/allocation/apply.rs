//! Decides what is to be written of a node's allocations, and writes it; of one node one at a time.
//!
//! What was stored when the node's turn came is what is decided by. Each write names the version that it changes, so that a decision about
//! something that has changed since is refused by the API server, and made anew. What cannot be written is reported, and the others are gone on
//! with ([`Turn`] says with which).
//!
//! A version tells of changes of one object, and room is shared by several. So that no replica that had the lease before, and none of our own
//! writes that nobody has answered, grants what was lent to somebody else since:
//! * A grant is written only after the API server has said that the lease is ours, later than the allocations were listed. So whoever has lost
//!   the lease has listed them, for any grant that is still on its way, before the next one got it.
//! * A grant is for an object with the finalizer. On each object of the node that has one and no grant, this process writes something before
//!   its first grant: a status, or the finalizer is taken away, and for a grant put there again by itself. What others have on their way names an
//!   older version then and is refused; where it came first, ours is refused, and nothing is granted by that decision. A finalizer of this
//!   process is good for one try: after one that was not answered it is renewed.
//!
//! So it takes no clocks, and a process may sleep between any two lines. What is needed: an API server that answers from its store and heeds
//! versions, no two processes that run under one name, and no object whose finalizer this replica may not write, and the one before may.
//!
//! Nothing of this keeps a former replica from taking a grant back by what it knew before, as long as the object has not changed: its room is
//! unused then, and lent to nobody twice.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use reprise_crds::{GPUQueueAllocation, OPERATOR_FIELD_MANAGER};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::build::{Step, What};
use super::dereference::{Found, asked};
use super::room::Failure;
use super::status::Said;
use super::turn::Turn;
use crate::clock;
use crate::context::Context;
use crate::error::OperatorError;
use crate::finalizers::{Finalizer, set};
use crate::metrics::Write;
use crate::names::QUEUES_FINALIZER;
use crate::status::tell;
use crate::watch::own_of;

/// HTTP's codes for what is not there and for what somebody else has changed; from the last on, what was asked for may be done all the same.
const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;
const UNCERTAIN: u16 = 500;

/// So many nodes are decided about at once, at the most.
const AT_ONCE: usize = 16;

/// By node the unique ids of allocations that this process has given the finalizer, for a grant that it has not tried to write since.
type Held = BTreeMap<String, BTreeSet<String>>;

/// Whose turn it is to write of a node. Several nodes may share one.
#[derive(Debug, Default)]
pub struct Turns([Mutex<Held>; AT_ONCE]);

/// An allocation of which something could not be written.
#[derive(Debug)]
pub struct Unwritten {
    /// It.
    pub object: Arc<GPUQueueAllocation>,
    /// What the API server said.
    pub error: OperatorError,
}

impl Turns {
    fn of(&self, node: &str) -> &Mutex<Held> {
        let mut hasher = DefaultHasher::new();
        node.hash(&mut hasher);
        let index = hasher.finish() as usize % AT_ONCE;
        &self.0[index]
    }
}

/// Makes all allocations of a node what they should be now. Of which the API server did not take something.
///
/// # Errors
/// It did not answer, or the lease is another replica's: what comes after that is not written.
pub async fn settle(node: &str, context: &Context) -> Result<Vec<Unwritten>, OperatorError> {
    let mut turn = context.turns.of(node).lock().await;
    let mut found = asked(node, context).await?;
    let held = turn.entry(node.to_owned()).or_default();
    forget(held, &found);
    found.held.clone_from(held);
    let (mut writes, mut unwritten) = (Turn::of(found, clock::now()), Vec::new());
    while let Some(step) = writes.next_step() {
        let Err(error) = act(&step, held, context).await else { continue };
        let Some(code) = error.code() else { return Err(error) };
        let is_outdated = code == CONFLICT || code >= UNCERTAIN;
        writes.failed(&step, if is_outdated { Failure::Outdated } else { Failure::Refused });
        unwritten.push(Unwritten { object: step.object, error });
    }
    if held.is_empty() {
        turn.remove(node);
    }
    Ok(unwritten)
}

/// Keeps only those that wait for a grant still.
fn forget(held: &mut BTreeSet<String>, found: &Found) {
    let waits = |uid: &String| {
        let mut all = found.allocations.iter().map(|of| &of.object);
        let it = all.find(|object| object.metadata.uid.as_ref() == Some(uid));
        it.is_some_and(|it| it.status.as_ref().is_none_or(|status| status.allocations.is_empty()))
    };
    held.retain(waits);
}

async fn act(step: &Step, held: &mut BTreeSet<String>, context: &Context) -> Result<(), OperatorError> {
    let object = &*step.object;
    let namespace = object.namespace().unwrap_or_default();
    let api: Api<GPUQueueAllocation> = Api::namespaced(context.client.clone(), &namespace);
    let uid = object.uid().unwrap_or_default();
    match &step.what {
        What::Hold => {
            set(context, object, &api, QUEUES_FINALIZER, Finalizer::Wanted).await?;
            held.insert(uid);
            Ok(())
        }
        What::LetGo => {
            held.remove(&uid);
            set(context, object, &api, QUEUES_FINALIZER, Finalizer::Unwanted).await.map(drop)
        }
        What::GiveBack(said) | What::Say(said) => write(object, &api, said, context).await,
        What::Grant(said) => {
            // Also when it is not answered.
            held.remove(&uid);
            if !context.holding.is_ours().await? {
                return Err(OperatorError::LeaseLost);
            }
            write(object, &api, said, context).await
        }
    }
}

/// Writes a status. What others have in it stays: a change of that is another version.
async fn write(
    object: &GPUQueueAllocation,
    api: &Api<GPUQueueAllocation>,
    said: &Said,
    context: &Context,
) -> Result<(), OperatorError> {
    let (name, status) = (object.name_any(), &said.status);
    let grants = if status.allocations.is_empty() { Value::Null } else { json!(status.allocations) };
    let body = json!({
        "metadata": { "resourceVersion": object.resource_version() },
        "status": {
            "observedGeneration": status.observed_generation,
            "allocations": grants,
            "expiresAt": status.expires_at,
            "conditions": status.conditions,
        },
    });
    let params =
        PatchParams { field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    context.triggers.own.expect(object.metadata.uid.as_ref(), &own_of(Some(status)));
    match api.patch_status(&name, &params, &Patch::Merge(&body)).await {
        Ok(_) => {}
        // Deleted meanwhile, and its grant with it.
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(()),
        Err(error) => {
            return Err(OperatorError::api(format!("write the status of GPUQueueAllocation {name}"))(error));
        }
    }
    context.metrics.wrote("GPUQueueAllocation", Write::Status);
    for finding in &said.news {
        tell(context, object, finding).await;
    }
    Ok(())
}
