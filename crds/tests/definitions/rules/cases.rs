//! Tables of objects: a minimal object of a kind, and merge patches (RFC 7396) that are accepted or rejected.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// All cases of one kind.
pub(crate) struct Table {
    pub(crate) kind: &'static str,
    /// Minimal valid object of the kind.
    pub(crate) base: Value,
    pub(crate) cases: Vec<Case>,
    /// Paths, and patches with a value at the path that violates the schema's bounds.
    pub(crate) out_of_bounds: Vec<(&'static str, Value)>,
    /// Parses an object into the Rust type and serializes it.
    pub(crate) round_trip: fn(Value) -> Result<Value, serde_json::Error>,
}

/// One object, with its old version if it is an update.
pub(crate) struct Case {
    pub(crate) what: &'static str,
    pub(crate) old: Option<Value>,
    pub(crate) patch: Value,
    /// Part of the message of the rule that rejects the object.
    pub(crate) refused: Option<&'static str>,
}

impl Table {
    /// Returns the minimal object with a patch applied.
    pub(crate) fn object(&self, patch: &Value) -> Value {
        let mut object = self.base.clone();
        merge(&mut object, patch);
        object
    }
}

/// Returns the case of a new object that is accepted.
pub(crate) fn accepts(what: &'static str, spec: Value) -> Case {
    Case { what, old: None, patch: of_spec(spec), refused: None }
}

/// Returns the case of a new object that is rejected with this message part.
pub(crate) fn refuses(words: &'static str, spec: Value) -> Case {
    Case { what: words, old: None, patch: of_spec(spec), refused: Some(words) }
}

/// Returns the case of an update that is accepted.
pub(crate) fn changes(what: &'static str, old: Value, new: Value) -> Case {
    Case { what, old: Some(of_spec(old)), patch: of_spec(new), refused: None }
}

/// Returns the case of an update that is rejected with this message part.
pub(crate) fn keeps(words: &'static str, old: Value, new: Value) -> Case {
    Case { what: words, old: Some(of_spec(old)), patch: of_spec(new), refused: Some(words) }
}

/// Returns the case of a new object whose name is rejected with this message part.
pub(crate) fn refuses_name(words: &'static str, name: &str) -> Case {
    Case { what: words, old: None, patch: json!({"metadata": {"name": name}}), refused: Some(words) }
}

/// Returns the case of a new object whose name is accepted.
pub(crate) fn accepts_name(what: &'static str, name: &str) -> Case {
    Case { what, old: None, patch: json!({"metadata": {"name": name}}), refused: None }
}

/// Parses and serializes an object, for [`Table::round_trip`].
pub(crate) fn round_trip<T: DeserializeOwned + Serialize>(object: Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(serde_json::from_value::<T>(object)?)
}

pub(crate) fn of_spec(spec: Value) -> Value {
    Value::Object([("spec".to_owned(), spec)].into_iter().collect())
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let target = target.as_object_mut().expect("made an object above");
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            merge(target.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}
