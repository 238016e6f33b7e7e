//! The heartbeat thread: sends heartbeats to every member, on separate connections.
//!
//! It shares only small values with the link thread and never calls the sink, so slow work cannot delay a
//! heartbeat.

use std::sync::Arc;

use reprise_agent_core::heartbeats::Heartbeats;
use reprise_agent_core::registrar::Granted;
use reprise_identity::Security;
use reprise_proto::controlplane::HeartbeatRequest;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::dial::connect_lazy;
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use super::Shared;
use super::link::{HeartbeatState, Link};
use super::members::for_each_link;

/// Runs the heartbeat thread until shutdown.
pub(super) fn run(runtime: &Runtime, shared: &Arc<Shared>) {
    runtime.block_on(async {
        let mut shutdown = shared.shutdown.subscribe();
        tokio::select! {
            _ = shutdown.wait_for(|shutdown| *shutdown) => {}
            () = for_each_link(shared, |link| run_heartbeats(shared.clone(), link)) => {}
        }
    });
}

/// Sends heartbeats for every registration of a link until the link is closed.
async fn run_heartbeats(shared: Arc<Shared>, link: Arc<Link>) {
    let mut grants = link.granted.subscribe();
    loop {
        let granted = *grants.borrow_and_update();
        let beats = async {
            match granted {
                None => {}
                Some(granted) => beat(&shared, &link, granted).await,
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = link.closed() => return,
            // The sender is owned by the link.
            _ = grants.changed() => {}
            () = beats => {}
        }
    }
}

/// Sends heartbeats for one registration until the member does not know it.
async fn beat(shared: &Shared, link: &Link, granted: Granted) {
    let mut heartbeats = Heartbeats::new(granted);
    let mut client = connect(&link.endpoint, &shared.settings.security);
    loop {
        sleep(heartbeats.wait(shared.now())).await;
        heartbeats.send(shared.now());
        let request = HeartbeatRequest { node: u32::from(granted.node.0), epoch: granted.epoch.0 };
        let beats = match timeout(heartbeats.answer_within(), client.heartbeat(request)).await {
            Ok(Ok(reply)) if reply.get_ref().known => {
                link.record_heartbeat(granted.epoch, reply.get_ref().slots_version);
                HeartbeatState::Answered
            }
            Ok(Ok(_)) => HeartbeatState::Unknown(granted.epoch),
            Ok(Err(_)) | Err(_) => {
                shared.counters.beats_failed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                // A half-open connection would swallow all further heartbeats.
                client = connect(&link.endpoint, &shared.settings.security);
                HeartbeatState::Failing
            }
        };
        link.beats.send_if_modified(|known| std::mem::replace(known, beats) != beats);
        if let HeartbeatState::Unknown(_) = beats {
            return;
        }
    }
}

fn connect(endpoint: &Endpoint, security: &Security) -> MembershipClient<Channel> {
    MembershipClient::new(connect_lazy(endpoint, security))
}
