//! Every object of the tables in `crds/tests/rules`, which say what is accepted and what is refused with which words: the API
//! server decides as they say. There the rules are evaluated by a library; here by Kubernetes, with everything else it checks.
//!
//! The tables are that crate's own files, so no case can be in one place only.

use http::Method;
use kube::{Client, Error, ResourceExt};
use reprise_e2e::ApiServer;
use serde_json::{Value, json};

use crate::objects::{DEFINITIONS, api, create, refusal, space};
use cases::{Case, Table};

#[path = "../../../crds/tests/rules/cases.rs"]
mod cases;
#[path = "../../../crds/tests/rules/cluster.rs"]
mod cluster;
#[path = "../../../crds/tests/rules/node.rs"]
mod node;
#[path = "../../../crds/tests/rules/others.rs"]
mod others;
#[path = "../../../crds/tests/rules/pool.rs"]
mod pool;

/// Where the objects of the tables are, those that are in a namespace.
const SPACE: &str = "reprise";

/// Nothing is stored, and fields that nobody knows are refused, as `kubectl` asks for.
const TRIED: &str = "dryRun=All&fieldValidation=Strict";

fn tables() -> Vec<Table> {
    vec![cluster::table(), pool::table(), others::queues(), others::slack(), others::tenant(), node::table()]
}

/// Objects of one kind, as they are written by whoever may.
struct Kind<'a> {
    server: &'a ApiServer,
    admin: Client,
    table: Table,
}

pub(crate) fn the_server_decides_on_every_object_of_the_tables_as_they_say(server: &ApiServer) {
    space(server, SPACE);
    let kinds: Vec<Kind<'_>> =
        tables().into_iter().map(|table| Kind { server, admin: server.admin(), table }).collect();
    for definition in DEFINITIONS.iter() {
        let kind = &definition.spec.names.kind;
        assert!(kinds.iter().any(|one| one.table.kind == kind), "{kind} has no table");
    }
    let disagreements: Vec<String> = kinds.iter().flat_map(Kind::disagreements).collect();
    assert!(disagreements.is_empty(), "{}", disagreements.join("\n"));
}

impl Kind<'_> {
    fn disagreements(&self) -> Vec<String> {
        let table = &self.table;
        assert!(!table.cases.is_empty() && !table.out_of_bounds.is_empty(), "{}: an empty table", table.kind);
        let cases = table.cases.iter().filter_map(|case| self.judge(case).err().map(|why| (case.what, why)));
        let bounds = table
            .out_of_bounds
            .iter()
            .filter_map(|(path, patch)| self.judge_bound(path, patch).err().map(|why| (*path, why)));
        cases.chain(bounds).map(|(what, why)| format!("{}: {what}: {why}", table.kind)).collect()
    }

    /// Why the server decides otherwise.
    fn judge(&self, case: &Case) -> Result<(), String> {
        let object = self.table.object(&case.patch);
        let outcome = match &case.old {
            None => self.written(&object),
            Some(old) => self.changed(&self.table.object(old), object.clone()),
        };
        match (outcome, case.refused) {
            (Ok(stored), None) => self.reads(&stored).and_then(|()| self.defaults(&object, &stored)),
            (Ok(_), Some(_)) => Err("it is taken".to_owned()),
            (Err(refused), Some(words)) => expect(refused, 422, words),
            (Err((code, said)), None) => Err(format!("it is refused: {code} {said}")),
        }
    }

    /// Why the server takes what the schema's bounds refuse, or says something else of it.
    fn judge_bound(&self, path: &str, patch: &Value) -> Result<(), String> {
        match self.written(&self.table.object(patch)) {
            Ok(_) => Err("it is taken".to_owned()),
            // A field that nobody knows is refused before the schema is looked at.
            Err((400, said)) => expect((400, said), 400, &format!("unknown field \"{path}\"")),
            Err(refused) => expect(refused, 422, path),
        }
    }

    /// What a program of ours reads and writes back is what it was.
    fn reads(&self, stored: &Value) -> Result<(), String> {
        let back = (self.table.round_trip)(stored.clone()).map_err(|error| error.to_string())?;
        for part in ["spec", "status"] {
            if back[part] != stored[part] {
                return Err(format!("{part} is stored as {} and read as {}", stored[part], back[part]));
            }
        }
        Ok(())
    }

    /// What the server has put where nothing was said is what a program of ours takes for it in the object as it was sent.
    fn defaults(&self, sent: &Value, stored: &Value) -> Result<(), String> {
        let read = (self.table.round_trip)(sent.clone()).map_err(|error| error.to_string())?;
        for part in ["spec", "status"] {
            if read[part] != stored[part] {
                return Err(format!(
                    "{part} is stored as {} and read of what was sent as {}",
                    stored[part], read[part]
                ));
            }
        }
        Ok(())
    }

    /// Writes a new object, and its status when it has one.
    fn written(&self, object: &Value) -> Result<Value, (u16, String)> {
        if object["status"].is_null() {
            return self.send(Method::POST, "", object);
        }
        let mut without = object.clone();
        without.as_object_mut().expect("an object").remove("status");
        self.once_stored(&without, |stored| {
            let mut stored = stored.clone();
            stored["status"] = object["status"].clone();
            let name = name(&stored);
            self.send(Method::PUT, &format!("/{name}/status"), &stored)
        })
    }

    /// Writes an object where another one is. Nothing is renamed: the new one has the old one's name.
    fn changed(&self, old: &Value, new: Value) -> Result<Value, (u16, String)> {
        self.once_stored(old, |stored| {
            let mut changed = new;
            changed["metadata"] = stored["metadata"].clone();
            self.send(Method::PUT, &format!("/{}", name(stored)), &changed)
        })
    }

    /// Does something while an object is stored.
    fn once_stored<T>(&self, object: &Value, then: impl FnOnce(&Value) -> T) -> T {
        let stored = create(self.server, SPACE, object);
        let name = stored.name_any();
        let outcome = then(&serde_json::to_value(stored).expect("an object is JSON"));
        let api = api(&self.admin, self.table.kind, SPACE);
        self.server.block_on(api.delete(&name, &kube::api::DeleteParams::default())).expect("it is removed");
        outcome
    }

    fn send(&self, method: Method, below: &str, object: &Value) -> Result<Value, (u16, String)> {
        let collection = api(&self.admin, self.table.kind, SPACE).resource_url().to_owned();
        let request = http::Request::builder()
            .method(method)
            .uri(format!("{collection}{below}?{TRIED}"))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(serde_json::to_vec(object).expect("an object is JSON"))
            .expect("a request");
        let answer: Result<Value, Error> = self.server.block_on(self.admin.request(request));
        match answer {
            Ok(stored) => Ok(stored),
            refused => Err(refusal(refused).expect("no answer of 2xx")),
        }
    }
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().expect("a name")
}

fn expect((code, said): (u16, String), wanted: u16, words: &str) -> Result<(), String> {
    if code == wanted && said.contains(words) {
        return Ok(());
    }
    Err(format!("{}", json!({ "wanted": [wanted, words], "said": [code, said] })))
}
