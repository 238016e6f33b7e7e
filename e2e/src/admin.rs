//! The admin port of a process, as a scraper sees it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

use crate::wait::wait_until;

/// One answer takes about a millisecond.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Where a process serves its status.
#[derive(Clone, Debug)]
pub struct Admin {
    address: String,
}

impl Admin {
    /// The port at `host:port`.
    pub fn at(address: &str) -> Admin {
        Admin { address: address.to_owned() }
    }

    /// One GET: status code and body.
    ///
    /// # Errors
    /// Nobody answers.
    pub fn get(&self, path: &str) -> io::Result<(u16, String)> {
        self.get_as(path, "*/*").map(|(code, _, body)| (code, body))
    }

    /// One GET with an `Accept` header: status code, head and body.
    ///
    /// # Errors
    /// As [`Admin::get`].
    pub fn get_as(&self, path: &str, accept: &str) -> io::Result<(u16, String, String)> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(ANSWER_WITHIN))?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: e2e\r\nAccept: {accept}\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let torn = || io::Error::new(io::ErrorKind::InvalidData, "no HTTP answer");
        let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(torn)?;
        let code = head.split_whitespace().nth(1).and_then(|code| code.parse().ok()).ok_or_else(torn)?;
        Ok((code, head.to_ascii_lowercase(), body.to_owned()))
    }

    /// `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The sum of all samples of a metric whose labels have these words.
    ///
    /// # Panics
    /// When the process serves no metrics.
    pub fn metric(&self, name: &str, words: &str) -> f64 {
        let (code, text) = self.get("/metrics").expect("the metrics are served");
        assert_eq!(code, 200);
        let samples = text.lines().filter(|line| line.starts_with(name) && line.contains(words));
        samples.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }

    /// A page of JSON.
    ///
    /// # Panics
    /// When the process does not serve it.
    pub fn json(&self, path: &str) -> Value {
        let (code, body) = self.get(path).unwrap_or_else(|error| panic!("{path} is not served: {error}"));
        assert_eq!(code, 200, "{path} says: {body}");
        serde_json::from_str(&body).expect("a page of JSON")
    }

    /// Numbers of an agent's core, all of one moment.
    pub fn counters(&self) -> Counters {
        Counters(self.json("/status")["counters"].clone())
    }

    /// One of them.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters().get(name)
    }

    /// Waits until a number is what is wanted; gives it.
    ///
    /// # Panics
    /// When it is not within the bound.
    pub fn wait_for(&self, name: &str, within: Duration, wanted: impl Fn(u64) -> bool) -> u64 {
        let mut last = 0;
        wait_until(name, within, || {
            last = self.counter(name);
            wanted(last).then_some(last)
        })
    }

    /// Waits until nothing is on its way to or from the agent's disk and nobody holds anything.
    ///
    /// # Panics
    /// When that is not within the bound.
    pub fn wait_quiet(&self, within: Duration) -> Counters {
        const BUSY: [&str; 6] = [
            "unsaved_blocks",
            "pool_pending_free_bytes",
            "fills_in_flight",
            "reserved_bytes",
            "read_leases",
            "serves_in_flight",
        ];
        wait_until("an agent at rest", within, || {
            let counters = self.counters();
            BUSY.iter().all(|name| counters.get(name) == 0).then_some(counters)
        })
    }
}

/// Numbers of an agent's core, all of one moment.
#[derive(Clone, Debug)]
pub struct Counters(Value);

impl Counters {
    /// One of them.
    ///
    /// # Panics
    /// When there is none of this name.
    pub fn get(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("no counter is called '{name}'"))
    }
}
