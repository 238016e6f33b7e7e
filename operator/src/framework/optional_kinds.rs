//! Optional kinds of children, which the API server may not serve or the operator may not be permitted to
//! write: admission policies, claim templates and monitors.
//!
//! A cheap request, at the start and then periodically, checks whether a kind is usable. Until then it is not
//! watched, and a cluster that needs it is rejected with the cause.
//!
//! The removal of a kind in use is not handled. Its watch fails and is retried, which is logged.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use kube::api::{Api, DynamicObject, ListParams};

use crate::framework::child::ChildKind;
use crate::framework::child_stores::{ChildStores, KindAccess};
use crate::framework::error::{FORBIDDEN, NOT_FOUND};

/// Interval of checks while a kind is unusable.
const POLL_INTERVAL: Duration = Duration::from_secs(20);
/// Interval after the API server did not respond.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// Follows a kind once it is usable; `following` is its watch. `on_usable` runs after its store is filled.
pub(crate) async fn follow(
    client: Client,
    kind: ChildKind,
    stores: Arc<ChildStores>,
    on_usable: impl Future<Output = ()>,
    following: impl Future<Output = ()>,
) {
    let api = Api::all_with(client, &kind.resource());
    loop {
        let wait = match check_access(&api).await {
            Ok(KindAccess::Usable) => break,
            Ok(access) => {
                stores.set_access(kind, access);
                POLL_INTERVAL
            }
            Err(error) => {
                let kind = kind.as_str();
                tracing::info!(%error, kind, "cannot check whether an optional kind is usable; retrying");
                RETRY_INTERVAL
            }
        };
        tokio::time::sleep(wait).await;
    }
    let usable = async {
        // A kind is usable only after its store is filled. The wait fails if the process is shutting down.
        if stores.wait_until_filled(kind).await.is_ok() {
            stores.set_access(kind, KindAccess::Usable);
            on_usable.await;
        }
    };
    tokio::join!(following, usable);
}

async fn check_access(api: &Api<DynamicObject>) -> Result<KindAccess, kube::Error> {
    match api.list(&ListParams::default().limit(1)).await {
        Ok(_) => Ok(KindAccess::Usable),
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(KindAccess::NotServed),
        Err(kube::Error::Api(status)) if status.code == FORBIDDEN => Ok(KindAccess::NotAllowed),
        Err(error) => Err(error),
    }
}
