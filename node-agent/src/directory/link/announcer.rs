//! The announcer of a link: sends the outbox's messages to the member, one after the other.

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

/// The result of a message.
enum SendOutcome {
    /// The member has replied: continue immediately.
    Done,
    /// Failed: retry after a pause.
    Retry,
}

impl Link {
    /// Sends batches one after the other, since their order matters more than overlapping batches.
    pub(super) async fn announce(&self, shared: &Shared) {
        let mut client = DirectoryService::new(self.channel.clone());
        let mut backoff = Backoff::default();
        loop {
            // Taken before locking the outbox, so that heartbeats never wait for it.
            let slots_version = self.slots_version.lock().unwrap_or_else(PoisonError::into_inner).take();
            let next = {
                let mut outbox = self.outbox();
                if let Some((epoch, version)) = slots_version {
                    outbox.note_version(epoch, version);
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
                    shared.emit(DirectoryEvent::InventoryRequested { slots });
                    continue; // the sink may have blocked: check the state again
                }
                Next::QuerySlots(node, epoch) => self.request_slots(shared, &mut client, node, epoch).await,
                Next::Send(batch) => self.send(shared, &mut client, &batch).await,
            };
            match sent {
                SendOutcome::Done => backoff.reset(),
                SendOutcome::Retry => sleep(backoff.next(jitter())).await,
            }
        }
    }

    /// Requests the member's slots, and those for which it needs an inventory.
    async fn request_slots(
        &self,
        shared: &Shared,
        client: &mut DirectoryService<Channel>,
        node: NodeId,
        epoch: Epoch,
    ) -> SendOutcome {
        let request = SlotsRequest { node: u32::from(node.0), epoch: epoch.0 };
        let Ok(reply) = within(shared.settings.call_timeout, client.slots(request)).await else {
            return SendOutcome::Retry;
        };
        if reply.fenced {
            self.fence(epoch);
            return SendOutcome::Retry;
        }
        let sets = (SlotSet::from_bytes(&reply.owned), SlotSet::from_bytes(&reply.wanted));
        let (Some(owned), Some(wanted)) = sets else {
            tracing::error!(member = %self.name, "invalid slot sets in the member's reply");
            return SendOutcome::Retry;
        };
        self.outbox().set_slots(epoch, reply.slots_version, &owned, &wanted);
        SendOutcome::Done
    }

    async fn send(
        &self,
        shared: &Shared,
        client: &mut DirectoryService<Channel>,
        batch: &Batch,
    ) -> SendOutcome {
        let (epoch, sequence) = (batch.epoch, batch.sequence);
        match within(shared.settings.call_timeout, client.update(wire::update_request(batch))).await {
            Ok(reply) => {
                let outcome = {
                    let mut outbox = self.outbox();
                    outbox.note_version(epoch, reply.slots_version);
                    outbox.process_answer(epoch, sequence, wire::answer(&reply))
                };
                match outcome {
                    Outcome::Applied(changes) => {
                        shared.counters.changes_announced.fetch_add(changes as u64, Ordering::Relaxed);
                    }
                    Outcome::Gap => tracing::info!(
                        member = %self.name,
                        sequence,
                        expected = reply.expected_sequence,
                        "the directory missed changes; announcing everything again"
                    ),
                    Outcome::Fenced => {
                        self.fence(epoch);
                        return SendOutcome::Retry;
                    }
                    Outcome::Stale => {}
                }
                SendOutcome::Done
            }
            Err(status) if status.code() == Code::InvalidArgument => {
                let reason = status.message();
                tracing::error!(member = %self.name, sequence, reason, "the directory rejected an announcement");
                self.outbox().process_rejection();
                SendOutcome::Retry
            }
            // The registrar reports an unreachable member; the batch is retried.
            Err(_) => SendOutcome::Retry,
        }
    }
}
