//! The heartbeat thread: one beat after the other on a connection of its own, and nothing else.
//!
//! It shares only watch values with the link thread and never calls the sink, so nothing slow can hold a beat back.

use std::time::Duration;

use reprise_proto::controlplane::HeartbeatRequest;
use reprise_proto::controlplane::membership_client::MembershipClient;
use tokio::runtime::Runtime;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::transport::{Channel, Endpoint};

use super::{Beats, Granted, Shared};

/// Time for one beat, in beats' periods: with a death after six periods, three beats may go unanswered before it.
const ANSWER_PERIODS: u32 = 2;
/// A beat waits at least so long, however short its period is.
const ANSWER_MIN: Duration = Duration::from_millis(100);

/// Runs until shutdown.
pub(super) fn run(runtime: &Runtime, shared: &Shared, endpoint: &Endpoint) {
    runtime.block_on(async {
        let mut shutdown = shared.shutdown.subscribe();
        tokio::select! {
            _ = shutdown.wait_for(|shutdown| *shutdown) => {}
            () = beat_for_ever(shared, endpoint) => {}
        }
    });
}

async fn beat_for_ever(shared: &Shared, endpoint: &Endpoint) {
    let mut grants = shared.granted.subscribe();
    loop {
        let granted = *grants.borrow_and_update();
        let changed = match granted {
            None => grants.changed().await,
            Some(granted) => tokio::select! {
                changed = grants.changed() => changed,
                () = beat(shared, endpoint, granted) => grants.changed().await,
            },
        };
        if changed.is_err() {
            return; // the client is gone
        }
    }
}

/// Beats for one registration until the control plane does not know it.
async fn beat(shared: &Shared, endpoint: &Endpoint, granted: Granted) {
    let mut ticks = interval(granted.heartbeat_every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let patience = (granted.heartbeat_every * ANSWER_PERIODS).max(ANSWER_MIN);
    let mut client = connect(endpoint);
    loop {
        ticks.tick().await;
        let request = HeartbeatRequest { node: u32::from(granted.node.0), epoch: granted.epoch.0 };
        let beats = match timeout(patience, client.heartbeat(request)).await {
            Ok(Ok(reply)) if reply.get_ref().known => Beats::Answered,
            Ok(Ok(_)) => Beats::Unknown(granted.epoch),
            Ok(Err(_)) | Err(_) => {
                shared.counters.beats_failed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                // A connection that has died without a word would swallow every further beat.
                client = connect(endpoint);
                Beats::Failing
            }
        };
        shared.beats.send_if_modified(|known| std::mem::replace(known, beats) != beats);
        if let Beats::Unknown(_) = beats {
            return;
        }
    }
}

fn connect(endpoint: &Endpoint) -> MembershipClient<Channel> {
    MembershipClient::new(endpoint.connect_lazy())
}
