//! Types shared by several kinds: texts with a pattern, amounts with a unit, choices, selectors and
//! workload settings.
//!
//! Each type writes its own bounds into the schema, so that no field lacks them: the API server estimates
//! the cost of CEL rules from the longest text and list that the schema allows. The API server validates
//! values. Code that reads an object parses amounts again ([`Quantity::bytes`], [`Span::duration`]) and
//! gets a `Result`.
//!
//! Not here: Kubernetes' own `Quantity`, whose schema adds 4 KiB of description to each field, and checks
//! that need more than the object. The operator performs those and sets a condition.

mod amounts;
mod choices;
mod selection;
mod texts;
mod workloads;

pub use amounts::{AmountError, Percent, Permille, Quantity, Span};
pub use choices::{DeletionPolicy, DeviceClass, Engine, FallbackEngine, ForeignSignatures, NodeMode};
pub use selection::{
    ClusterRef, ConfigMapRef, KeyRef, LabelSelector, LabelTerm, LabelTermOperator, Labels, ObjectRef,
    SecretRef, Toleration, TolerationEffect, TolerationOperator,
};
pub use texts::{
    ConfirmationText, CpuAmount, DeviceGlob, DevicePath, Digest, Endpoint, GpuUuid, HostPath, ImageDigest,
    ImageRepository, ImageTag, KeyName, KeyPrefix, LabelKey, LabelValue, LogFilter, Name, NodeName,
    OciReference, PciAddress, Serial, ShortName, SocketMode, Text, Topic, Uid, Version,
};
pub use workloads::{Amounts, Image, LogFormat, LogSettings, PullPolicy, Resources};

pub(crate) use choices::choice;

use serde::de::DeserializeOwned;

/// Returns the value that the API server makes from `{}`. Every field of the type has a default.
pub(crate) fn from_defaults<T: DeserializeOwned>() -> T {
    serde_json::from_value(serde_json::Value::Object(serde_json::Map::new()))
        .expect("every field of the type has a default")
}
