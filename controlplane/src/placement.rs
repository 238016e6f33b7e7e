//! The Placement service: what nodes report and are told, where blocks and prompts go, and what tenants may have.

mod holdings;
mod nodes;
mod places;
mod reports;
mod routes;
mod tenants;

use std::sync::Arc;
use std::time::Instant;

use reprise_controlplane_store::Store;
use reprise_proto::controlplane::placement_server::Placement;
use reprise_proto::controlplane::{
    ListHoldingsReply, ListHoldingsRequest, ListTenantsReply, ListTenantsRequest, PlaceReply, PlaceRequest,
    RemoveTenantReply, RemoveTenantRequest, ReportReply, ReportRequest, RouteReply, RouteRequest,
    SetNodeReply, SetNodeRequest, SetTenantReply, SetTenantRequest,
};
use tonic::{Request, Response, Status};

use crate::chains::Chains;
use crate::cluster::Cluster;
use crate::directory::DirectoryService;
use crate::identity::Identity;
use crate::metrics::Call;
use crate::shards::{MemberView, Shards};
use crate::tenants::Tenants;

pub(crate) use nodes::unknown;
pub(crate) use reports::bytes;

/// Whoever owns this hash slot decides who gives blocks to whom: one member, and the next one when it is gone.
const MOVES_SLOT: u16 = 0;

/// See the module.
#[derive(Debug)]
pub struct PlacementService {
    cluster: Arc<Cluster>,
    shards: Arc<Shards>,
    tenants: Arc<Tenants>,
    directory: Arc<DirectoryService>,
    chains: Chains,
    store: Arc<dyn Store>,
    identity: Identity,
}

/// What the service works on.
#[derive(Clone, Debug)]
pub struct PlacementParts {
    /// The nodes.
    pub cluster: Arc<Cluster>,
    /// This member's place in the map.
    pub shards: Arc<Shards>,
    /// The budgets.
    pub tenants: Arc<Tenants>,
    /// The replicas.
    pub directory: Arc<DirectoryService>,
    /// Where modes are kept.
    pub store: Arc<dyn Store>,
    /// Of that store.
    pub identity: Identity,
}

impl PlacementService {
    /// A service over the shared state.
    pub fn new(parts: PlacementParts) -> PlacementService {
        let PlacementParts { cluster, shards, tenants, directory, store, identity } = parts;
        let chains = Chains::new(directory.clone(), shards.clone());
        PlacementService { cluster, shards, tenants, directory, chains, store, identity }
    }

    /// Whether it is this member that decides who gives blocks to whom.
    fn decides_moves(&self) -> bool {
        let own = |view: &MemberView| view.map.owner(MOVES_SLOT) == view.map.position(self.shards.name());
        self.shards.certain_map().is_some_and(|view| own(&view))
    }
}

#[tonic::async_trait]
impl Placement for PlacementService {
    async fn report(&self, request: Request<ReportRequest>) -> Result<Response<ReportReply>, Status> {
        reports::take(self, request.into_inner()).map(Response::new)
    }

    async fn place(&self, request: Request<PlaceRequest>) -> Result<Response<PlaceReply>, Status> {
        let start = Instant::now();
        let reply = places::place(self, request.into_inner()).await?;
        self.cluster.metrics.took(Call::place, start.elapsed());
        Ok(Response::new(reply))
    }

    async fn route(&self, request: Request<RouteRequest>) -> Result<Response<RouteReply>, Status> {
        let start = Instant::now();
        let reply = routes::route(self, request.into_inner()).await?;
        self.cluster.metrics.took(Call::route, start.elapsed());
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
        holdings::list(self, &request.into_inner()).map(Response::new)
    }
}
