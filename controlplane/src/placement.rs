//! The Placement service: what nodes report and are told, where blocks and prompts go, and what tenants may have.

mod reports;
mod tenants;

use std::sync::Arc;

use reprise_proto::controlplane::placement_server::Placement;
use reprise_proto::controlplane::{
    ListTenantsReply, ListTenantsRequest, PlaceReply, PlaceRequest, RemoveTenantReply, RemoveTenantRequest,
    ReportReply, ReportRequest, RouteReply, RouteRequest, SetNodeReply, SetNodeRequest, SetTenantReply,
    SetTenantRequest,
};
use tonic::{Request, Response, Status};

use crate::cluster::Cluster;
use crate::shards::Shards;
use crate::tenants::Tenants;

pub(crate) use reports::bytes;

/// See the module.
#[derive(Debug)]
pub struct PlacementService {
    cluster: Arc<Cluster>,
    shards: Arc<Shards>,
    tenants: Arc<Tenants>,
}

impl PlacementService {
    /// A service over the shared state.
    pub fn new(cluster: Arc<Cluster>, shards: Arc<Shards>, tenants: Arc<Tenants>) -> PlacementService {
        PlacementService { cluster, shards, tenants }
    }
}

#[tonic::async_trait]
impl Placement for PlacementService {
    async fn report(&self, request: Request<ReportRequest>) -> Result<Response<ReportReply>, Status> {
        reports::take(self, request.into_inner()).map(Response::new)
    }

    async fn place(&self, _: Request<PlaceRequest>) -> Result<Response<PlaceReply>, Status> {
        Err(Status::unimplemented("placement"))
    }

    async fn route(&self, _: Request<RouteRequest>) -> Result<Response<RouteReply>, Status> {
        Err(Status::unimplemented("routing"))
    }

    async fn set_node(&self, _: Request<SetNodeRequest>) -> Result<Response<SetNodeReply>, Status> {
        Err(Status::unimplemented("modes"))
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
}
