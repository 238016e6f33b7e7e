//! The heartbeat thread: one beat after the other to every member, on connections of its own, and nothing else.
//!
//! It shares only small values with the link thread and never calls the sink, so nothing slow can hold a beat back.

use std::sync::Arc;
use std::time::Duration;

use reprise_proto::controlplane::HeartbeatRequest;
use reprise_proto::controlplane::membership_client::MembershipClient;
use tokio::runtime::Runtime;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::transport::{Channel, Endpoint};

use super::Shared;
use super::link::{Beats, Granted, Link};
use super::members::for_each_link;

/// Time for one beat, in beats' periods: with a death after six periods, three beats may go unanswered before it.
const ANSWER_PERIODS: u32 = 2;
/// A beat waits at least so long, however short its period is.
const ANSWER_MIN: Duration = Duration::from_millis(100);

/// Runs until shutdown.
pub(super) fn run(runtime: &Runtime, shared: &Arc<Shared>) {
    runtime.block_on(async {
        let mut shutdown = shared.shutdown.subscribe();
        tokio::select! {
            _ = shutdown.wait_for(|shutdown| *shutdown) => {}
            () = for_each_link(shared, |link| beat_for_ever(shared.clone(), link)) => {}
        }
    });
}

/// Beats for every registration of a link until it is closed.
async fn beat_for_ever(shared: Arc<Shared>, link: Arc<Link>) {
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
            // The sender lives in the link.
            _ = grants.changed() => {}
            () = beats => {}
        }
    }
}

/// Beats for one registration until the member does not know it.
async fn beat(shared: &Shared, link: &Link, granted: Granted) {
    let mut ticks = interval(granted.heartbeat_every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let patience = (granted.heartbeat_every * ANSWER_PERIODS).max(ANSWER_MIN);
    let mut client = connect(&link.endpoint);
    loop {
        ticks.tick().await;
        let request = HeartbeatRequest { node: u32::from(granted.node.0), epoch: granted.epoch.0 };
        let beats = match timeout(patience, client.heartbeat(request)).await {
            Ok(Ok(reply)) if reply.get_ref().known => {
                link.hear(granted.epoch, reply.get_ref().slots_version);
                Beats::Answered
            }
            Ok(Ok(_)) => Beats::Unknown(granted.epoch),
            Ok(Err(_)) | Err(_) => {
                shared.counters.beats_failed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                // A connection that has died without a word would swallow every further beat.
                client = connect(&link.endpoint);
                Beats::Failing
            }
        };
        link.beats.send_if_modified(|known| std::mem::replace(known, beats) != beats);
        if let Beats::Unknown(_) = beats {
            return;
        }
    }
}

fn connect(endpoint: &Endpoint) -> MembershipClient<Channel> {
    MembershipClient::new(endpoint.connect_lazy())
}
