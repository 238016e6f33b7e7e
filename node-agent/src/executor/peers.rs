//! Blocks of peers and for peers: fetches, offers, and the requests of peers.
//!
//! A node gets the blocks of a tenant only if it acts for the tenant: according to the control plane, or because this
//! node has offered blocks of the tenant to it. Every node gets those of the public tenant. Other requests wait for news of the control plane
//! ([`DirectoryClient::await_tenant`](crate::directory::DirectoryClient::await_tenant)), then find no blocks.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use reprise_agent_core::effect::{FetchRequest, FillId, Offer};
use reprise_agent_core::event::{Event, FillError, FillUpdate, PeerEvent, PeerOffer, PeerRequest};
use reprise_agent_core::limits::OFFER_RETRY_MAX;
use reprise_policy::{NodeId, TenantId, TenantName, peer};
use reprise_transport::{CompositeTransport, Transport};

use super::{Deployment, Executor, lock};
use crate::directory::StrangerRequest;
use crate::encryption::Declaration;

/// Time for which a node may fetch the blocks that were offered to it. Offers and fetches end much earlier.
const OFFERED_FOR: Duration = Duration::from_secs(60);

/// A fetch in progress.
pub(super) struct PendingFetch {
    pub(super) since: Instant,
    pub(super) layers: u32,
    /// Span shared by the blocks of one fetch.
    _span: tracing::Span,
}

/// Tenants whose blocks were offered to nodes, with the time of the last offer. Bounded by the nodes that get copies
/// within a minute, times their tenants.
#[derive(Default)]
pub(super) struct OfferedTenants {
    offered: HashMap<(NodeId, TenantId), Instant>,
}

impl OfferedTenants {
    fn add(&mut self, offered: (NodeId, TenantId), now: Instant) {
        self.offered.retain(|_, at| now.duration_since(*at) < OFFERED_FOR);
        self.offered.insert(offered, now);
    }

    fn contains(&self, offered: (NodeId, TenantId), now: Instant) -> bool {
        self.offered.get(&offered).is_some_and(|at| now.duration_since(*at) < OFFERED_FOR)
    }
}

impl Executor {
    pub(super) fn fetch(&mut self, NodeId(node): NodeId, request: FetchRequest) {
        let (fetch, layers) = (request.fetch.0, request.layout.layers());
        let fills: Vec<FillId> = request.blocks.iter().map(|block| block.fill).collect();
        let tenant = request.tenant;
        let name = lock(&self.parts.tenants).name(tenant).cloned();
        let endpoints = self.parts.directory.peer_endpoints(NodeId(node));
        let pending = match (&self.parts.peers, endpoints, name) {
            (Some(peers), Some(endpoints), Some(name)) => {
                peers.fetch(&endpoints[..], request.of_tenant(name)).map_err(|error| error.to_string())
            }
            (None, _, _) => Err("this agent has no peer transport".to_owned()),
            (_, None, _) => Err("it has no known endpoint of a protocol of this agent".to_owned()),
            (_, _, None) => {
                self.log_unnamed(tenant);
                Err("the name of the tenant is unknown".to_owned())
            }
        };
        match pending {
            Ok(()) => {
                let since = Instant::now();
                let span = tracing::debug_span!("fetch", fetch, node, blocks = fills.len());
                let pending = |fill| (fill, PendingFetch { since, layers, _span: span.clone() });
                self.fetches.extend(fills.into_iter().map(pending));
            }
            Err(reason) => {
                tracing::warn!(node, blocks = fills.len(), reason, "cannot fetch blocks from a peer");
                let update = FillUpdate::Failed(FillError::PeerLost);
                let lost = |fill| Event::Peer(PeerEvent::Fill { fill, update: update.clone() });
                self.feedback.extend(fills.into_iter().map(lost));
            }
        }
    }

    pub(super) fn offer(&mut self, NodeId(node): NodeId, offer: Offer) {
        let (id, tenant) = (offer.offer, offer.tenant);
        let name = lock(&self.parts.tenants).name(tenant).cloned();
        let endpoints = self.parts.directory.peer_endpoints(NodeId(node));
        let sent = match (&self.parts.peers, endpoints, name) {
            (Some(peers), Some(endpoints), Some(name)) => {
                peers.offer(&endpoints[..], offer.of_tenant(name)).map_err(|error| error.to_string())
            }
            (None, _, _) => Err("this agent has no peer transport".to_owned()),
            (_, None, _) => Err("it has no known endpoint of a protocol of this agent".to_owned()),
            (_, _, None) => {
                self.log_unnamed(tenant);
                Err("the name of the tenant is unknown".to_owned())
            }
        };
        match sent {
            Ok(()) => self.offered.add((NodeId(node), tenant), Instant::now()),
            Err(reason) => {
                tracing::debug!(node, reason, "cannot offer blocks to a peer");
                self.feedback.push_back(Event::Peer(PeerEvent::OfferFailed { offer: id }));
            }
        }
    }

    /// Logs once per tenant that its blocks cannot be copied to other nodes.
    fn log_unnamed(&mut self, tenant: TenantId) {
        if self.unnamed.insert(tenant) {
            tracing::warn!(
                number = tenant.0,
                "blocks of a tenant without a known name cannot be copied to other nodes; add the tenant to [[tenants]] in the agent's configuration, or connect one of its engines"
            );
        }
    }

    /// Converts a peer's request for the core. A request of a node that may not act for the tenant is decided later
    /// ([`Executor::decided`]).
    pub(crate) fn resolve_request(
        &mut self,
        from: String,
        request: peer::PeerRequest<TenantName>,
    ) -> Option<PeerRequest> {
        if self.may_act(&from, &request.tenant) {
            return self.numbered(request);
        }
        let unknown = match self.parts.deployment {
            Deployment::Clustered => {
                self.parts.directory.await_tenant(StrangerRequest { from, request }).err()?
            }
            Deployment::StandAlone => StrangerRequest { from, request },
        };
        self.decided(unknown, false)
    }

    /// Converts a request whose node acts for the tenant; otherwise reports its blocks as absent.
    pub(crate) fn decided(
        &mut self,
        StrangerRequest { from, request }: StrangerRequest,
        acts_for: bool,
    ) -> Option<PeerRequest> {
        if acts_for {
            return self.numbered(request);
        }
        tracing::warn!(
            node = from,
            tenant = %request.tenant,
            "refused blocks to a node that has no session and no blocks of their tenant, according to the control plane"
        );
        self.send_absent(&request);
        None
    }

    fn may_act(&self, node: &str, tenant: &TenantName) -> bool {
        let directory = &self.parts.directory;
        let offered = || {
            let number = lock(&self.parts.tenants).number_of(tenant)?;
            Some(self.offered.contains((directory.node_of(node)?, number), Instant::now()))
        };
        self.parts.public_tenant.is(tenant) || directory.acts_for(node, tenant) || offered().unwrap_or(false)
    }

    /// Replaces the name of the tenant by its number. If another tenant has the number here, there are no blocks.
    fn numbered(&mut self, request: peer::PeerRequest<TenantName>) -> Option<PeerRequest> {
        if let Some(tenant) = lock(&self.parts.tenants).number_of(&request.tenant) {
            return Some(request.of_tenant(tenant));
        }
        self.send_absent(&request);
        None
    }

    fn send_absent<Tenant>(&self, request: &peer::PeerRequest<Tenant>) {
        self.with_peers(|peers| {
            (0..).zip(&request.keys).for_each(|(block, _)| peers.serve_absent(request.serve, block));
        });
    }

    /// Converts a peer's offer for the core. Rejects it if the node or the tenant has no number here, or if the node
    /// does not act for the tenant.
    pub(crate) fn resolve_offer(&mut self, offer: peer::PeerOffer<String, TenantName>) -> Option<PeerOffer> {
        let peer::PeerOffer { offer, from, tenant, layout, keys } = offer;
        let node = self.parts.directory.node_of(&from);
        let acts_for = self.parts.directory.acts_for(&from, &tenant);
        let is_unknown =
            tenant != TenantName::default_tenant() && self.parts.keys.learn(&tenant) == Declaration::Unknown;
        let has_no_key = self.parts.keys.are_missing(&tenant);
        // Only nodes of the cluster may register tenant names here.
        let tenant =
            node.filter(|_| acts_for).map(|from| (from, lock(&self.parts.tenants).enter_offered(&tenant)));
        let reason = match tenant {
            Some((_, Ok(_))) if is_unknown => {
                "the tenant's salt, which declares whether it must be encrypted, is not on this node"
                    .to_owned()
            }
            Some((_, Ok(_))) if has_no_key => "the tenant must be encrypted and has no key here".to_owned(),
            Some((from, Ok(tenant))) => return Some(PeerOffer { offer, from, tenant, layout, keys }),
            Some((_, Err(error))) => error.to_string(),
            None => "the peer is not known to act for the tenant".to_owned(),
        };
        tracing::debug!(node = from, reason, "rejected an offer of a peer");
        self.with_peers(|peers| peers.answer_offer(offer, &[], OFFER_RETRY_MAX));
        None
    }

    /// Serving requires the transport, which received the peer's request.
    pub(super) fn with_peers(&self, serve: impl FnOnce(&CompositeTransport)) {
        if let Some(peers) = &self.parts.peers {
            serve(peers);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_allows_requests_of_its_node_and_tenant_for_a_minute() {
        let (mut offered, start) = (OfferedTenants::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        offered.add((NodeId(1), TenantId(2)), start);
        assert!(offered.contains((NodeId(1), TenantId(2)), after(59)));
        assert!(!offered.contains((NodeId(1), TenantId(2)), after(60)));
        assert!(!offered.contains((NodeId(1), TenantId(3)), after(1)));
        assert!(!offered.contains((NodeId(2), TenantId(2)), after(1)));
        offered.add((NodeId(2), TenantId(2)), after(61));
        assert_eq!(offered.offered.len(), 1, "old offers are forgotten");
    }
}
