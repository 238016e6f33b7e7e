//! Kinds of children that not every API server has, and that not every operator may write: policies that change pods, templates of
//! claims, monitors.
//!
//! A small question, asked at the start and from time to time, says whether a kind can be used. As long as it cannot, nobody
//! watches it, and a cluster that needs it is refused with what is missing ([`crate::cluster::validate`]).
//!
//! Deliberately absent: a kind that was there and goes. Its watch fails and begins again, which is said in the log.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use kube::api::{Api, DynamicObject, ListParams};

use crate::child::ChildKind;
use crate::watch::Triggers;
use crate::world::World;

/// A kind that cannot be used is asked about again so often.
const ASK_AGAIN: Duration = Duration::from_secs(20);
/// After an API server that did not answer.
const ASK_SOON: Duration = Duration::from_secs(2);

/// HTTP's codes, as the API server uses them.
const FORBIDDEN: u16 = 403;
const NOT_FOUND: u16 = 404;

/// Whether objects of a kind can be made here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// They can.
    Usable,
    /// The API server does not know the kind.
    NotServed,
    /// The operator may not look at them, so it may not write them either.
    NotAllowed,
}

/// Follows a kind from when it can be used; `following` is its watch.
pub(crate) async fn follow(
    client: Client,
    kind: ChildKind,
    world: Arc<World>,
    triggers: Arc<Triggers>,
    following: impl Future<Output = ()>,
) {
    let api = Api::all_with(client, &kind.resource());
    loop {
        let wait = match ask(&api).await {
            Ok(Access::Usable) => break,
            Ok(access) => {
                world.set_access(kind, access);
                ASK_AGAIN
            }
            Err(error) => {
                let kind = kind.as_str();
                tracing::info!(%error, kind, "whether the kind can be used here is not known yet");
                ASK_SOON
            }
        };
        tokio::time::sleep(wait).await;
    }
    let usable = async {
        // Only a store that has been filled says what is there. It is dropped when the process ends.
        if world.filled(kind).await.is_ok() {
            world.set_access(kind, Access::Usable);
            triggers.all_clusters(&world).await;
        }
    };
    tokio::join!(following, usable);
}

async fn ask(api: &Api<DynamicObject>) -> Result<Access, kube::Error> {
    match api.list(&ListParams::default().limit(1)).await {
        Ok(_) => Ok(Access::Usable),
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(Access::NotServed),
        Err(kube::Error::Api(status)) if status.code == FORBIDDEN => Ok(Access::NotAllowed),
        Err(error) => Err(error),
    }
}
