//! Client of the admin port of a process: status pages, counters and metrics.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use ::http::{HeaderName, HeaderValue};
use reprise_identity::{Expected, Security};
use reprise_testkit::http::{Client, Request};
use serde_json::Value;

use crate::wait::wait_until;

/// Bound on one response, which normally takes about a millisecond.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// The admin port of a process.
#[derive(Clone, Debug)]
pub struct Admin {
    address: String,
    /// Certificates of the client, read for each request, and the role of the process; none without TLS.
    certificates: Option<(PathBuf, Expected)>,
}

impl Admin {
    /// Returns the admin port at `host:port`.
    pub fn at(address: &str) -> Admin {
        Admin { address: address.to_owned(), certificates: None }
    }

    /// Returns the same port for a client with the certificates in a folder.
    #[must_use]
    pub fn with_certificates(&self, folder: PathBuf, expected: Expected) -> Admin {
        Admin { address: self.address.clone(), certificates: Some((folder, expected)) }
    }

    /// Sends one GET and returns the status code and the body.
    ///
    /// # Errors
    /// The process does not respond.
    pub fn get(&self, path: &str) -> io::Result<(u16, String)> {
        self.get_as(path, "*/*").map(|(code, _, body)| (code, body))
    }

    /// Sends one GET with an `Accept` header. Returns the status code, the head in lower case, and the body.
    ///
    /// # Errors
    /// As [`Admin::get`].
    pub fn get_as(&self, path: &str, accept: &str) -> io::Result<(u16, String, String)> {
        let request =
            Request::get(path).header("accept", accept).body(String::new()).map_err(io::Error::other)?;
        let client = match &self.certificates {
            Some((folder, expected)) => {
                Client::new(Security::read(folder).map_err(io::Error::other)?, expected.clone())
            }
            None => Client::plain(),
        };
        let answer = client.send(&self.address, request, ANSWER_WITHIN).map_err(io::Error::other)?;
        let line = |(name, value): (&HeaderName, &HeaderValue)| {
            format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes()))
        };
        let head: String = answer.headers.iter().map(line).collect();
        Ok((answer.code, head.to_ascii_lowercase(), answer.body))
    }

    /// Returns the address as `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the sum of all samples of a metric whose line contains `words`; 0 without such samples. A counter with
    /// labels has samples from its first event on.
    ///
    /// # Panics
    /// If the process serves no metrics.
    pub fn metric(&self, name: &str, words: &str) -> f64 {
        assert!(
            name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'),
            "'{name}' is not a metric's name"
        );
        let (code, text) = self.get("/metrics").expect("the metrics are served");
        assert_eq!(code, 200);
        let is_sample = |line: &&str| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])) && line.contains(words)
        };
        let values =
            text.lines().filter(is_sample).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
        // The sum of no floats is -0.
        values.fold(0.0, |sum, value| sum + value)
    }

    /// Returns a page of JSON.
    ///
    /// # Panics
    /// If the process does not serve the page.
    pub fn json(&self, path: &str) -> Value {
        let (code, body) = self.get(path).unwrap_or_else(|error| panic!("{path} is not served: {error}"));
        assert_eq!(code, 200, "{path}: {body}");
        serde_json::from_str(&body).expect("a page of JSON")
    }

    /// Returns the counters of an agent's core, all read at the same moment.
    pub fn counters(&self) -> Counters {
        Counters(self.json("/status")["counters"].clone())
    }

    /// Returns the counter of this name.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters().get(name)
    }

    /// Waits until a counter satisfies `wanted`, and returns its value.
    ///
    /// # Panics
    /// If the counter does not satisfy `wanted` within the bound.
    pub fn wait_for(&self, name: &str, within: Duration, wanted: impl Fn(u64) -> bool) -> u64 {
        let mut last = 0;
        wait_until(name, within, || {
            last = self.counter(name);
            wanted(last).then_some(last)
        })
    }

    /// Waits until the agent has no disk I/O in flight and no session holds a lease or a reservation.
    ///
    /// # Panics
    /// If the agent is still busy after the bound.
    pub fn wait_quiet(&self, within: Duration) -> Counters {
        const BUSY: [&str; 6] = [
            "unsaved_blocks",
            "pool_pending_free_bytes",
            "fills_in_flight",
            "reserved_bytes",
            "read_leases",
            "serves_in_flight",
        ];
        wait_until("an idle agent", within, || {
            let counters = self.counters();
            BUSY.iter().all(|name| counters.get(name) == 0).then_some(counters)
        })
    }
}

/// The counters of an agent's core, all read at the same moment.
#[derive(Clone, Debug)]
pub struct Counters(Value);

impl Counters {
    /// Returns the counter of this name.
    ///
    /// # Panics
    /// If no counter has this name.
    pub fn get(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("no counter has the name '{name}'"))
    }
}
