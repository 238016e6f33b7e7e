//! `[events]`: how much of the directory's changes is kept for readers, and where they are published.

use std::net::SocketAddr;

use reprise_policy::ByteSize;
use serde::Deserialize;

use super::ConfigError;

/// Below this, one batch of an agent would be all that is kept.
const HISTORY_MIN: ByteSize = ByteSize(1 << 20);
/// More is not history any more, but a second directory.
const HISTORY_MAX: ByteSize = ByteSize(64 << 30);
/// A topic is the first frame of every message; subscribers name its beginning.
const TOPIC_BYTES_MAX: usize = 255;
/// A batch is 5 KiB at the most: 5 GiB.
const BUFFER_STEPS_MAX: usize = 1 << 20;
/// Subscribers and replays at once, at the most: each may have 4 MiB on its way.
const SUBSCRIBERS_LIMIT_MAX: usize = 1024;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EventsConfig {
    /// Memory for the last changes, 20 bytes each.
    pub history: ByteSize,
    /// Where batches of KV events are published (ZeroMQ PUB); nowhere without an address.
    pub publish: Option<SocketAddr>,
    /// Where batches that were missed are asked for (ZeroMQ ROUTER).
    pub replay: Option<SocketAddr>,
    /// First frame of every message.
    pub topic: String,
    /// Published batches that are kept for replay.
    pub buffer_steps: usize,
    /// Connections at once, to each of both addresses.
    pub subscribers: usize,
}

impl EventsConfig {
    /// Refuses what cannot work, with words.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let refuse = |field, reason: String| Err(ConfigError::Value { field, reason });
        if !(HISTORY_MIN..=HISTORY_MAX).contains(&self.history) {
            return refuse("events.history", format!("{HISTORY_MIN} to {HISTORY_MAX}"));
        }
        if self.replay.is_some() && self.publish.is_none() {
            let reason = "nothing is published that could be asked for: set events.publish as well";
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
    /// 32 MiB are 1.6 million changes: 26 s of one of 16 members at a million a second. 10,000 steps are what vLLM keeps; 50 MiB
    /// at the most. Routers are few.
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
