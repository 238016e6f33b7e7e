//! `[events]`: size of the change history, and addresses of the KV-event publisher.

use std::net::SocketAddr;

use reprise_policy::ByteSize;
use serde::Deserialize;

use super::ConfigError;

/// Smallest history; below this it holds only one batch of an agent.
const HISTORY_MIN: ByteSize = ByteSize(1 << 20);
/// Largest history; a larger one would exceed the directory itself.
const HISTORY_MAX: ByteSize = ByteSize(64 << 30);
/// Longest topic. A topic is the first frame of every message; subscriptions match its prefix.
const TOPIC_BYTES_MAX: usize = 255;
/// Most buffered batches. A batch is at most 5 KiB, so the buffer is at most 5 GiB.
const BUFFER_STEPS_MAX: usize = 1 << 20;
/// Most subscribers, and most replay connections; each buffers up to 4 MiB of output.
const SUBSCRIBERS_LIMIT_MAX: usize = 1024;

/// Settings of the table `[events]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EventsConfig {
    /// Memory for the most recent directory changes, 20 bytes each.
    pub history: ByteSize,
    /// Address of the PUB socket for batches of KV events (ZeroMQ); publishing is off without one.
    pub publish: Option<SocketAddr>,
    /// Address of the ROUTER socket that replays missed batches (ZeroMQ).
    pub replay: Option<SocketAddr>,
    /// Topic: first frame of every message.
    pub topic: String,
    /// Number of published batches kept for replay.
    pub buffer_steps: usize,
    /// Maximum number of connections to each of the two addresses.
    pub subscribers: usize,
}

impl EventsConfig {
    /// Addresses that are served.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        [self.publish, self.replay].into_iter().flatten()
    }

    /// Checks ranges and dependencies between fields.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let refuse = |field, reason: String| Err(ConfigError::Value { field, reason });
        if !(HISTORY_MIN..=HISTORY_MAX).contains(&self.history) {
            return refuse("events.history", format!("{HISTORY_MIN} to {HISTORY_MAX}"));
        }
        if self.replay.is_some() && self.publish.is_none() {
            let reason = "replay requires a publisher: set events.publish as well";
            return refuse("events.replay", reason.to_owned());
        }
        if self.topic.len() > TOPIC_BYTES_MAX {
            return refuse("events.topic", format!("at most {TOPIC_BYTES_MAX} bytes"));
        }
        if !(1..=BUFFER_STEPS_MAX).contains(&self.buffer_steps) {
            return refuse("events.buffer_steps", format!("1 to {BUFFER_STEPS_MAX}"));
        }
        if !(1..=SUBSCRIBERS_LIMIT_MAX).contains(&self.subscribers) {
            return refuse("events.subscribers", format!("1 to {SUBSCRIBERS_LIMIT_MAX}"));
        }
        Ok(())
    }
}

impl Default for EventsConfig {
    /// 32 MiB hold 1.6 million changes: 26 s for one of 16 members at a million changes a second in total.
    /// 10,000 batches is vLLM's default and takes at most 50 MiB. 64 connections suffice because routers are
    /// few.
    fn default() -> EventsConfig {
        EventsConfig {
            history: ByteSize(32 << 20),
            publish: None,
            replay: None,
            topic: "kv-events".to_owned(),
            buffer_steps: 10_000,
            subscribers: 64,
        }
    }
}
