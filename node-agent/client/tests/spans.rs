//! Tracing spans of an engine's calls.
//!
//! A separate test binary: `tracing` caches for the whole process whether a span has a subscriber. Tests
//! without a subscriber that reach a span first would disable it for the others.

#[allow(dead_code)] // these tests use a part of it
#[path = "client/fake_agent.rs"]
mod fake_agent;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

use reprise_client::{Client, LoadRequest, Scope};
use reprise_proto::local;
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

use fake_agent::{Answer, FakeAgent, Grant, SHORT, key, missed};

/// Name and fields of a span, as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RecordedSpan {
    name: &'static str,
    fields: BTreeMap<&'static str, String>,
}

/// Collects the spans of this crate in the order in which they were opened.
#[derive(Clone, Debug, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<(Id, RecordedSpan)>>>,
}

impl Visit for RecordedSpan {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.fields.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.to_owned());
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collector {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        let mut seen = RecordedSpan { name: attributes.metadata().name(), fields: BTreeMap::new() };
        attributes.record(&mut seen);
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push((id.clone(), seen));
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        // Span numbers are reused: take the latest.
        let (_, seen) = spans.iter_mut().rfind(|(seen, _)| seen == id).expect("the span was opened before");
        values.record(seen);
    }
}

/// Returns the spans that a client opens on this thread.
fn spans_of(calls: impl FnOnce()) -> Vec<RecordedSpan> {
    let collector = Collector::default();
    let subscriber = Registry::default().with(collector.clone());
    tracing::subscriber::with_default(subscriber, calls);
    let spans = collector.spans.lock().unwrap_or_else(PoisonError::into_inner);
    spans.iter().map(|(_, seen)| seen.clone()).collect()
}

fn seen(name: &'static str, fields: &[(&'static str, &str)]) -> RecordedSpan {
    RecordedSpan { name, fields: fields.iter().map(|(field, value)| (*field, (*value).to_owned())).collect() }
}

#[test]
fn every_call_has_a_span_and_the_wait_of_a_load_records_its_outcome() {
    let agent = FakeAgent::serve(|peer| {
        peer.serve_match();
        let (id, _) = peer.expect_load();
        let placed = vec![peer.place_block(0), missed(local::BlockStatus::BlockMiss)];
        peer.progress.begin(0, 5);
        peer.reply_loaded(id, Answer { load: 5, entry: 0, grant: Grant::First }, placed);
    });
    let spans = spans_of(|| {
        let client = agent.connect();
        client.match_keys(&[key(0)], Scope::Local).expect("an answer");
        drop(client.load(&LoadRequest::new(vec![key(0), key(1)])).expect("an answer"));
    });
    agent.join();
    let expected = [
        seen("agent_call", &[("request", "hello"), ("session", "0")]),
        seen("agent_call", &[("request", "match"), ("session", "1")]),
        seen("agent_call", &[("request", "load"), ("session", "1")]),
        seen("load_wait", &[("session", "1"), ("blocks", "2"), ("placed", "1"), ("outcome", "answered")]),
    ];
    assert_eq!(spans, expected);
}

#[test]
fn the_wait_of_an_unanswered_load_records_the_timeout() {
    let agent = FakeAgent::serve(|peer| {
        peer.expect_load();
        peer.receive();
    });
    let spans = spans_of(|| {
        let client = Client::connect(agent.options().call_timeout(SHORT)).expect("a session");
        let request = LoadRequest { deadline: SHORT, ..LoadRequest::new(vec![key(0)]) };
        client.load(&request).expect_err("the agent does not answer");
    });
    agent.join();
    let wait = spans.last().expect("the wait of the load");
    assert_eq!(wait.name, "load_wait");
    assert!(wait.fields["outcome"].contains("no answer"), "{wait:?}");
    assert!(!wait.fields.contains_key("placed"), "{wait:?}");
}
