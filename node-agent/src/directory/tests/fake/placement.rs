//! Replies of the fake member to reports and placement requests.

use reprise_proto::controlplane::placement_server::Placement;
use reprise_proto::controlplane::{
    ListHoldingsReply, ListHoldingsRequest, ListTenantsReply, ListTenantsRequest, PlaceReply, PlaceRequest,
    RemoveTenantReply, RemoveTenantRequest, ReportReply, ReportRequest, RouteReply, RouteRequest,
    SetNodeReply, SetNodeRequest, SetTenantReply, SetTenantRequest,
};
use tonic::{Request, Response, Status};

use super::Shared;

type Answer<T> = Result<Response<T>, Status>;

fn unsupported<T>() -> Answer<T> {
    Err(Status::unimplemented("the fake member supports reports and placement requests only"))
}

#[tonic::async_trait]
impl Placement for Shared {
    async fn report(&self, request: Request<ReportRequest>) -> Answer<ReportReply> {
        let reply = self.with(|state| {
            state.reports.push(request.into_inner());
            state.report_reply.clone()
        });
        Ok(Response::new(reply))
    }

    async fn place(&self, request: Request<PlaceRequest>) -> Answer<PlaceReply> {
        let reply = self.with(|state| {
            state.requests.push(request.into_inner());
            state.place_reply.clone()
        });
        reply.map(Response::new).ok_or_else(|| Status::unavailable("no placement reply is set"))
    }

    async fn route(&self, _: Request<RouteRequest>) -> Answer<RouteReply> {
        unsupported()
    }

    async fn set_node(&self, _: Request<SetNodeRequest>) -> Answer<SetNodeReply> {
        unsupported()
    }

    async fn set_tenant(&self, _: Request<SetTenantRequest>) -> Answer<SetTenantReply> {
        unsupported()
    }

    async fn remove_tenant(&self, _: Request<RemoveTenantRequest>) -> Answer<RemoveTenantReply> {
        unsupported()
    }

    async fn list_tenants(&self, _: Request<ListTenantsRequest>) -> Answer<ListTenantsReply> {
        unsupported()
    }

    async fn list_holdings(&self, _: Request<ListHoldingsRequest>) -> Answer<ListHoldingsReply> {
        unsupported()
    }
}
