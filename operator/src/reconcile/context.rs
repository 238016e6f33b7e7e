//! State shared by all reconciles.

use std::ops::Deref;
use std::sync::Arc;

use kube::Client;

use crate::framework::api_client::ApiRequests;
use crate::framework::services::Services;
use crate::reconcile::allocation::apply::NodeLocks;
use crate::reconcile::cluster::etcd::external::EtcdChecks;
use crate::reconcile::control_plane::ControlPlanes;
use crate::reconcile::pool::guard::Quiescence;
use crate::reconcile::profile::decisions::ProfileDecisions;
use crate::reconcile::profile::source::SourceCache;
use crate::reconcile::secrets::Secrets;
use crate::reconcile::stores::Stores;
use crate::settings::Settings;

/// Services of the framework, stores, settings, and memory between reconciles. The memory never affects the desired
/// objects: a process without it builds the same ones.
pub struct Context {
    services: Services,
    /// Objects as the watches last reported them.
    pub stores: Arc<Stores>,
    pub secrets: Secrets,
    pub settings: Settings,
    pub store_checks: EtcdChecks,
    pub control_planes: ControlPlanes,
    /// Time since the last change of engine sessions, by pool.
    pub quiescence: Quiescence,
    /// Locks that serialise grants of GPU queues on a node.
    pub(crate) node_locks: NodeLocks,
    pub profile_sources: SourceCache,
    /// Profile revision chosen for each node.
    pub decisions: ProfileDecisions,
}

impl Context {
    /// Creates a context with empty memory.
    pub fn new(client: (Client, ApiRequests), stores: Arc<Stores>, settings: Settings) -> Context {
        let replica = (settings.identity.as_str(), settings.namespace.as_str());
        let own_writes = Arc::clone(&stores.own_writes);
        let services = Services::new(client, replica, Arc::clone(&stores.children), own_writes);
        let addresses = settings.control_planes.iter().cloned().collect();
        Context {
            control_planes: ControlPlanes::new(addresses, services.metrics.calls.clone()),
            services,
            stores,
            secrets: Secrets::default(),
            settings,
            store_checks: EtcdChecks::default(),
            quiescence: Quiescence::default(),
            node_locks: NodeLocks::default(),
            profile_sources: SourceCache::default(),
            decisions: ProfileDecisions::default(),
        }
    }
}

impl Deref for Context {
    type Target = Services;

    fn deref(&self) -> &Services {
        &self.services
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::{Args, FromArgMatches};
    use serde_json::json;

    use super::*;
    use crate::framework::test_api_server::{error_response, serve};

    /// A context whose API server answers every request with 404.
    pub(crate) async fn context() -> Arc<Context> {
        let (client, _) = serve(vec![error_response(404, &json!([]))]);
        context_with(client, Stores::new().0)
    }

    /// A context with these objects.
    pub(crate) fn context_with(client: Client, stores: Stores) -> Arc<Context> {
        let options = ["", "--pod-name", "operator-0", "--pod-namespace", "reprise-system", "--admin-plain"];
        let parsed = Settings::augment_args(clap::Command::new("")).get_matches_from(options);
        let settings = Settings::from_arg_matches(&parsed).expect("valid options");
        let counted = (client, ApiRequests::default());
        Arc::new(Context::new(counted, Arc::new(stores), settings))
    }
}
