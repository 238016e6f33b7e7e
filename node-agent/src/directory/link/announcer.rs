//! The announcer of a link: sends the messages that the [`Announcer`] chooses, one after the other.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use reprise_agent_core::announcer::{Action, Effect, MemberSlots};
use reprise_agent_core::outbox::Batch;
use reprise_policy::{Epoch, NodeId, SlotSet};
use reprise_proto::controlplane::SlotsRequest;
use reprise_proto::controlplane::directory_client::DirectoryClient as DirectoryService;
use tokio::time::sleep;
use tonic::Code;
use tonic::transport::Channel;

use super::super::members::jitter;
use super::super::{DirectoryEvent, Shared, wire};
use super::{Link, within};

impl Link {
    /// Sends announcements until the link is closed.
    pub(super) async fn announce(&self, shared: &Shared) {
        let mut client = DirectoryService::new(self.channel.clone());
        loop {
            // Taken before locking the announcer, so that heartbeats never wait for it.
            let slots_version = self.slots_version.lock().unwrap_or_else(PoisonError::into_inner).take();
            let action = {
                let mut announcer = self.announcer();
                if let Some((epoch, version)) = slots_version {
                    announcer.outbox_mut().note_version(epoch, version);
                }
                announcer.next_action()
            };
            let effect = match action {
                Action::Wait => {
                    self.outbox_changed.notified().await;
                    continue;
                }
                Action::Inventory(slots) => {
                    shared.counters.inventories_wanted.fetch_add(1, Ordering::Relaxed);
                    shared.emit(DirectoryEvent::InventoryRequested { slots });
                    continue; // the sink may have blocked: check the state again
                }
                Action::QuerySlots(node, epoch) => self.request_slots(shared, &mut client, node, epoch).await,
                Action::Send(batch) => self.send(shared, &mut client, &batch).await,
            };
            match effect {
                Effect::Continue | Effect::Gap => {}
                Effect::Applied(changes) => {
                    shared.counters.changes_announced.fetch_add(changes as u64, Ordering::Relaxed);
                }
                Effect::Pause(pause) | Effect::Fenced(pause) => {
                    sleep(pause.draw(jitter())).await;
                    self.announcer().resume();
                }
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
    ) -> Effect {
        let request = SlotsRequest { node: u32::from(node.0), epoch: epoch.0 };
        let Ok(reply) = within(shared.settings.call_timeout, client.slots(request)).await else {
            return self.announcer().fail();
        };
        if reply.fenced {
            self.fence(epoch);
            return self.announcer().slots(epoch, None);
        }
        let sets = (SlotSet::from_bytes(&reply.owned), SlotSet::from_bytes(&reply.wanted));
        let (Some(owned), Some(wanted)) = sets else {
            tracing::error!(member = %self.name, "invalid slot sets in the member's reply");
            return self.announcer().fail();
        };
        let slots = MemberSlots { version: reply.slots_version, owned: &owned, wanted: &wanted };
        self.announcer().slots(epoch, Some(slots))
    }

    async fn send(&self, shared: &Shared, client: &mut DirectoryService<Channel>, batch: &Batch) -> Effect {
        let (epoch, sequence) = (batch.epoch, batch.sequence);
        match within(shared.settings.call_timeout, client.update(wire::update_request(batch))).await {
            Ok(reply) => {
                let effect = self.announcer().answer(batch, wire::answer(&reply), reply.slots_version);
                match effect {
                    Effect::Gap => tracing::info!(
                        member = %self.name,
                        sequence,
                        expected = reply.expected_sequence,
                        "the directory missed changes; announcing everything again"
                    ),
                    Effect::Fenced(_) => self.fence(epoch),
                    _ => {}
                }
                effect
            }
            Err(status) if status.code() == Code::InvalidArgument => {
                let reason = status.message();
                tracing::error!(member = %self.name, sequence, reason, "the directory rejected an announcement");
                self.announcer().reject()
            }
            // The registrar reports an unreachable member; the batch is retried.
            Err(_) => self.announcer().fail(),
        }
    }
}
