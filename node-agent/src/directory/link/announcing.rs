//! The announcer of a link: what the outbox says is next goes to the member, one message after the other.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use reprise_agent_core::backoff::Backoff;
use reprise_agent_core::outbox::{Batch, Next, Outcome};
use reprise_policy::{Epoch, NodeId, SlotSet};
use reprise_proto::controlplane::SlotsRequest;
use reprise_proto::controlplane::directory_client::DirectoryClient as DirectoryService;
use tokio::time::sleep;
use tonic::Code;
use tonic::transport::Channel;

use super::super::members::jitter;
use super::super::{DirectoryEvent, Shared, wire};
use super::{Link, within};

/// What became of a message.
enum Sent {
    /// Answered; go on at once.
    Settled,
    /// Try again after a while.
    Again,
}

impl Link {
    /// Sends batches one after the other: order is worth more than a second batch in flight.
    pub(super) async fn announce(&self, shared: &Shared) {
        let mut client = DirectoryService::new(self.channel.clone());
        let mut backoff = Backoff::default();
        loop {
            let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner).take();
            let next = {
                let mut outbox = self.outbox();
                if let Some((epoch, version)) = heard {
                    outbox.heard(epoch, version);
                }
                outbox.next_step()
            };
            let sent = match next {
                Next::Wait => {
                    self.outbox_changed.notified().await;
                    continue;
                }
                Next::Inventory(slots) => {
                    shared.counters.inventories_wanted.fetch_add(1, Ordering::Relaxed);
                    shared.emit(DirectoryEvent::InventoryWanted { slots });
                    continue; // the sink may have taken a while: look again
                }
                Next::Standing(node, epoch) => self.ask_standing(shared, &mut client, node, epoch).await,
                Next::Send(batch) => self.send(shared, &mut client, &batch).await,
            };
            match sent {
                Sent::Settled => backoff.reset(),
                Sent::Again => sleep(backoff.next(jitter())).await,
            }
        }
    }

    /// Asks which slots the member owns, and of which it wants an inventory.
    async fn ask_standing(
        &self,
        shared: &Shared,
        client: &mut DirectoryService<Channel>,
        node: NodeId,
        epoch: Epoch,
    ) -> Sent {
        let request = SlotsRequest { node: u32::from(node.0), epoch: epoch.0 };
        let Ok(reply) = within(shared.settings.call_timeout, client.slots(request)).await else {
            return Sent::Again;
        };
        if reply.fenced {
            self.fence(epoch);
            return Sent::Again;
        }
        let sets = (SlotSet::from_bytes(&reply.owned), SlotSet::from_bytes(&reply.wanted));
        let (Some(owned), Some(wanted)) = sets else {
            tracing::error!(member = %self.name, "the member's slots are no sets of slots");
            return Sent::Again;
        };
        self.outbox().follow(epoch, reply.slots_version, &owned, &wanted);
        Sent::Settled
    }

    async fn send(&self, shared: &Shared, client: &mut DirectoryService<Channel>, batch: &Batch) -> Sent {
        let (epoch, sequence) = (batch.epoch, batch.sequence);
        match within(shared.settings.call_timeout, client.update(wire::update_request(batch))).await {
            Ok(reply) => {
                let outcome = {
                    let mut outbox = self.outbox();
                    outbox.heard(epoch, reply.slots_version);
                    outbox.answered(epoch, sequence, wire::answer(&reply))
                };
                match outcome {
                    Outcome::Applied(changes) => {
                        shared.counters.changes_announced.fetch_add(changes as u64, Ordering::Relaxed);
                    }
                    Outcome::Gap => tracing::info!(
                        member = %self.name,
                        sequence,
                        expected = reply.expected_sequence,
                        "the directory has missed changes; announcing everything again"
                    ),
                    Outcome::Fenced => {
                        self.fence(epoch);
                        return Sent::Again;
                    }
                    Outcome::Stale => {}
                }
                Sent::Settled
            }
            Err(status) if status.code() == Code::InvalidArgument => {
                let reason = status.message();
                tracing::error!(member = %self.name, sequence, reason, "the directory refused an announcement");
                self.outbox().refused();
                Sent::Again
            }
            // The registrar reports an absent member; the batch stays and goes out again.
            Err(_) => Sent::Again,
        }
    }
}
