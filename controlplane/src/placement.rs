//! The Placement service: reports of nodes, placement of replicas, routing of prompts, node modes and tenant
//! budgets.

#[cfg(test)]
pub(crate) mod fuzz;
mod nodes;
mod places;
mod reports;
mod routes;
mod tenant_usage;
mod tenants;

use std::sync::Arc;
use std::time::Instant;

use reprise_controlplane_store::Store;
use reprise_identity::Security;
use reprise_identity::access::Call as AccessCall;
use reprise_proto::controlplane::placement_server::Placement;
use reprise_proto::controlplane::{
    ListHoldingsReply, ListHoldingsRequest, ListTenantsReply, ListTenantsRequest, PlaceReply, PlaceRequest,
    RemoveTenantReply, RemoveTenantRequest, ReportReply, ReportRequest, RouteReply, RouteRequest,
    SetNodeReply, SetNodeRequest, SetTenantReply, SetTenantRequest,
};
use tonic::{Request, Response, Status};

use crate::answers::Answers;
use crate::cluster::Cluster;
use crate::directory::DirectoryService;
use crate::grpc_server::caller::Caller;
use crate::identity::Identity;
use crate::metrics::Call;
use crate::prefix_match::PrefixMatcher;
use crate::shards::Shards;
use crate::tenants::Tenants;

pub(crate) use nodes::unknown_node;
pub(crate) use reports::bytes;

/// The Placement service of one member.
#[derive(Debug)]
pub struct PlacementService {
    cluster: Arc<Cluster>,
    shards: Arc<Shards>,
    tenants: Arc<Tenants>,
    directory: Arc<DirectoryService>,
    prefix_matcher: PrefixMatcher,
    store: Arc<dyn Store>,
    identity: Identity,
}

/// Shared state that the service works on.
#[derive(Clone, Debug)]
pub struct PlacementParts {
    /// Nodes, directory and ledgers of this member.
    pub cluster: Arc<Cluster>,
    /// This member's place among the members.
    pub shards: Arc<Shards>,
    /// Tenant budgets in the store.
    pub tenants: Arc<Tenants>,
    /// Directory service of this member.
    pub directory: Arc<DirectoryService>,
    /// Store of the node modes.
    pub store: Arc<dyn Store>,
    /// Identity of the store.
    pub identity: Identity,
    /// For calls to other members.
    pub security: Security,
}

impl PlacementService {
    /// Creates the service over the shared state.
    pub fn new(parts: PlacementParts) -> PlacementService {
        let PlacementParts { cluster, shards, tenants, directory, store, identity, security } = parts;
        let prefix_matcher = PrefixMatcher::new(directory.clone(), shards.clone(), security);
        PlacementService { cluster, shards, tenants, directory, prefix_matcher, store, identity }
    }

    /// Parts of this member that answer agents.
    fn answers(&self) -> Answers<'_> {
        Answers::new(&self.cluster, &self.shards, &self.tenants)
    }
}

#[tonic::async_trait]
impl Placement for PlacementService {
    async fn report(&self, request: Request<ReportRequest>) -> Result<Response<ReportReply>, Status> {
        Caller::authorise_number(&request, AccessCall::Report, &self.cluster, request.get_ref().node)?;
        reports::handle(self, request.into_inner()).map(Response::new)
    }

    async fn place(&self, request: Request<PlaceRequest>) -> Result<Response<PlaceReply>, Status> {
        let start = Instant::now();
        Caller::authorise_number(&request, AccessCall::Place, &self.cluster, request.get_ref().holder)?;
        let reply = places::place(self, request.into_inner()).await?;
        self.cluster.metrics.observe_call(Call::place, start.elapsed());
        Ok(Response::new(reply))
    }

    async fn route(&self, request: Request<RouteRequest>) -> Result<Response<RouteReply>, Status> {
        let start = Instant::now();
        let reply = routes::route(self, request.into_inner()).await?;
        self.cluster.metrics.observe_call(Call::route, start.elapsed());
        Ok(Response::new(reply))
    }

    async fn set_node(&self, request: Request<SetNodeRequest>) -> Result<Response<SetNodeReply>, Status> {
        nodes::set(self, request.into_inner()).await.map(Response::new)
    }

    async fn set_tenant(
        &self,
        request: Request<SetTenantRequest>,
    ) -> Result<Response<SetTenantReply>, Status> {
        tenants::set(self, request.into_inner()).await?;
        Ok(Response::new(SetTenantReply {}))
    }

    async fn remove_tenant(
        &self,
        request: Request<RemoveTenantRequest>,
    ) -> Result<Response<RemoveTenantReply>, Status> {
        tenants::remove(self, request.into_inner()).await?;
        Ok(Response::new(RemoveTenantReply {}))
    }

    async fn list_tenants(
        &self,
        _: Request<ListTenantsRequest>,
    ) -> Result<Response<ListTenantsReply>, Status> {
        tenants::list(self).map(Response::new)
    }

    async fn list_holdings(
        &self,
        request: Request<ListHoldingsRequest>,
    ) -> Result<Response<ListHoldingsReply>, Status> {
        tenant_usage::list(self, &request.into_inner()).map(Response::new)
    }
}
