//! Sends every object of the tables in `crds/tests/definitions/rules`, which list accepted and rejected objects with the
//! expected errors, to the API server. The tests of `crds` evaluate the rules by a library; here Kubernetes
//! does, with all its checks.
//!
//! The tables are included from that crate, so both tests have the same cases.

use http::Method;
use kube::{Client, Error, ResourceExt};
use reprise_e2e::ApiServer;
use serde_json::{Value, json};

use crate::resources::objects::{DEFINITIONS, api, create, refusal, space};
use cases::{Case, Table};

#[path = "../../../crds/tests/definitions/rules/cases.rs"]
mod cases;
#[path = "../../../crds/tests/definitions/rules/cluster.rs"]
mod cluster;
#[path = "../../../crds/tests/definitions/rules/node.rs"]
mod node;
#[path = "../../../crds/tests/definitions/rules/others.rs"]
mod others;
#[path = "../../../crds/tests/definitions/rules/pool.rs"]
mod pool;

/// Namespace of the namespaced objects.
const SPACE: &str = "reprise";

/// Query of a strict dry run, like that of `kubectl`: nothing is stored, and unknown fields are rejected.
const STRICT_DRY_RUN: &str = "dryRun=All&fieldValidation=Strict";

fn tables() -> Vec<Table> {
    vec![cluster::table(), pool::table(), others::queues(), others::slack(), others::tenant(), node::table()]
}

/// One kind with its table, and a client with all permissions.
struct Kind<'a> {
    server: &'a ApiServer,
    admin: Client,
    table: Table,
}

pub(crate) fn the_server_accepts_and_rejects_the_objects_of_the_tables_as_expected(server: &ApiServer) {
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
        let cases =
            table.cases.iter().filter_map(|case| self.check_case(case).err().map(|why| (case.what, why)));
        let bounds = table
            .out_of_bounds
            .iter()
            .filter_map(|(path, patch)| self.check_bound(path, patch).err().map(|why| (*path, why)));
        cases.chain(bounds).map(|(what, why)| format!("{}: {what}: {why}", table.kind)).collect()
    }

    /// Returns how the server's decision differs from a case.
    fn check_case(&self, case: &Case) -> Result<(), String> {
        let object = self.table.object(&case.patch);
        let outcome = match &case.old {
            None => self.dry_run(&object),
            Some(old) => self.dry_run_update(&self.table.object(old), object.clone()),
        };
        match (outcome, case.refused) {
            (Ok(stored), None) => {
                self.check_round_trip(&stored).and_then(|()| self.check_defaults(&object, &stored))
            }
            (Ok(_), Some(_)) => Err("the object is accepted".to_owned()),
            (Err(refused), Some(words)) => expect(refused, 422, words),
            (Err((code, message)), None) => Err(format!("the object is rejected: {code} {message}")),
        }
    }

    /// Returns how the server's decision differs for a value outside of the schema's bounds.
    fn check_bound(&self, path: &str, patch: &Value) -> Result<(), String> {
        match self.dry_run(&self.table.object(patch)) {
            Ok(_) => Err("the object is accepted".to_owned()),
            // Unknown fields are rejected before the schema is checked.
            Err((400, message)) => expect((400, message), 400, &format!("unknown field \"{path}\"")),
            Err(refused) => expect(refused, 422, path),
        }
    }

    /// Checks that reading and writing an object with the Rust type changes nothing.
    fn check_round_trip(&self, stored: &Value) -> Result<(), String> {
        let back = (self.table.round_trip)(stored.clone()).map_err(|error| error.to_string())?;
        for part in ["spec", "status"] {
            if back[part] != stored[part] {
                return Err(format!("{part} is stored as {} and read as {}", stored[part], back[part]));
            }
        }
        Ok(())
    }

    /// Checks that the defaults of the server are those of the Rust type.
    fn check_defaults(&self, sent: &Value, stored: &Value) -> Result<(), String> {
        let read = (self.table.round_trip)(sent.clone()).map_err(|error| error.to_string())?;
        for part in ["spec", "status"] {
            if read[part] != stored[part] {
                return Err(format!(
                    "{part} is stored as {} but the sent object is read as {}",
                    stored[part], read[part]
                ));
            }
        }
        Ok(())
    }

    /// Sends a dry run of a create, or of a status update if the object has a status.
    fn dry_run(&self, object: &Value) -> Result<Value, (u16, String)> {
        if object["status"].is_null() {
            return self.send(Method::POST, "", object);
        }
        let mut without = object.clone();
        without.as_object_mut().expect("an object").remove("status");
        self.while_stored(&without, |stored| {
            let mut stored = stored.clone();
            stored["status"] = object["status"].clone();
            let name = name(&stored);
            self.send(Method::PUT, &format!("/{name}/status"), &stored)
        })
    }

    /// Sends a dry run of an update. The new object gets the name of the old one.
    fn dry_run_update(&self, old: &Value, new: Value) -> Result<Value, (u16, String)> {
        self.while_stored(old, |stored| {
            let mut changed = new;
            changed["metadata"] = stored["metadata"].clone();
            self.send(Method::PUT, &format!("/{}", name(stored)), &changed)
        })
    }

    /// Runs a function while an object is stored.
    fn while_stored<T>(&self, object: &Value, then: impl FnOnce(&Value) -> T) -> T {
        let stored = create(self.server, SPACE, object);
        let name = stored.name_any();
        let outcome = then(&serde_json::to_value(stored).expect("an object is JSON"));
        let api = api(&self.admin, self.table.kind, SPACE);
        self.server
            .block_on(api.delete(&name, &kube::api::DeleteParams::default()))
            .expect("the object is deleted");
        outcome
    }

    fn send(&self, method: Method, below: &str, object: &Value) -> Result<Value, (u16, String)> {
        let collection = api(&self.admin, self.table.kind, SPACE).resource_url().to_owned();
        let request = http::Request::builder()
            .method(method)
            .uri(format!("{collection}{below}?{STRICT_DRY_RUN}"))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(serde_json::to_vec(object).expect("an object is JSON"))
            .expect("a request");
        let response: Result<Value, Error> = self.server.block_on(self.admin.request(request));
        match response {
            Ok(stored) => Ok(stored),
            refused => Err(refusal(refused).expect("an error response")),
        }
    }
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().expect("a name")
}

fn expect((code, message): (u16, String), expected: u16, words: &str) -> Result<(), String> {
    if code == expected && message.contains(words) {
        return Ok(());
    }
    Err(format!("{}", json!({ "expected": [expected, words], "received": [code, message] })))
}
