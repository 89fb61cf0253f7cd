//! A walk over the parameters of a [`Decoder`] under their names, whatever number of dimensions they
//! have.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};

use crate::Decoder;
use crate::module_path::ModulePath;

/// A parameter on the way.
pub(crate) struct Parameter<'a> {
    pub path: &'a ModulePath,
    pub shape: Vec<usize>,
    values: &'a dyn Fn() -> TensorData,
}

impl Parameter<'_> {
    /// Its values, drawn now if they have not been before.
    pub fn values(&self) -> TensorData {
        (self.values)()
    }
}

/// Calls `each` for every parameter, in the order of the fields, until it fails.
pub(crate) fn visit<E>(
    decoder: &Decoder,
    each: impl FnMut(Parameter<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let mut walk = Walk {
        path: ModulePath::default(),
        each,
        error: None,
    };
    decoder.visit(&mut walk);
    walk.error.map_or(Ok(()), Err)
}

/// A parameter that gets new values: its path, shape and the elements that the model wants. Values of
/// other elements are converted.
pub(crate) struct Vacancy<'a> {
    pub path: &'a ModulePath,
    pub shape: &'a [usize],
    pub dtype: DType,
}

/// Gives every parameter the values that `new` has for it; what has not been drawn never is.
pub(crate) fn replace<E>(
    decoder: Decoder,
    new: impl FnMut(Vacancy<'_>) -> Result<TensorData, E>,
) -> Result<Decoder, E> {
    let mut walk = Walk {
        path: ModulePath::default(),
        each: new,
        error: None,
    };
    let decoder = decoder.map(&mut walk);
    walk.error.map_or(Ok(decoder), Err)
}

struct Walk<F, E> {
    path: ModulePath,
    each: F,
    error: Option<E>,
}

impl<F, E> ModuleVisitor for Walk<F, E>
where
    F: FnMut(Parameter<'_>) -> Result<(), E>,
{
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        let parameter = Parameter {
            path: &self.path,
            shape: param.lazy_shape().to_vec(),
            values: &|| param.val().inner().into_data(),
        };
        self.error = (self.each)(parameter).err();
    }
}

impl<F, E> ModuleMapper for Walk<F, E>
where
    F: FnMut(Vacancy<'_>) -> Result<TensorData, E>,
{
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let device = param.lazy_device();
        // Routers stay in f32 whatever the type of the model.
        let dtype = match device.settings().float_dtype.into() {
            DType::F64 => DType::F64,
            _ if self.path.parts().contains(&"router") => DType::F32,
            dtype => dtype,
        };
        let shape = param.lazy_shape().to_vec();
        let vacancy = Vacancy {
            path: &self.path,
            shape: &shape,
            dtype,
        };
        match (self.each)(vacancy) {
            Ok(data) => {
                let tensor = Tensor::<D>::from_data(data, (&device, dtype));
                let id = param.id;
                param.transform_for_load(tensor, id)
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}
